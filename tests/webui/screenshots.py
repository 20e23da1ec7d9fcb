"""`python -m tests.webui.screenshots URL DIR`: pictures of the chat page, of a server that runs.

They show what the model of that server writes: light, dark, on a phone, and the machine under load.
If the model reads pictures, one more shows a scan before it is sent.
"""

import argparse
import json
import time
from pathlib import Path

from tests.helpers.drawn import document, invoice, saved
from tests.webui.chromium import Browser

QUESTION = "Write a Python function that adds two numbers. Use a code block."
LOAD = """void [1, 2, 3, 4, 5, 6].map((i) => setTimeout(() => fetch('v1/completions', {
  method: 'POST',
  headers: {'content-type': 'application/json'},
  body: JSON.stringify({prompt: 'word '.repeat(300 * i), max_tokens: 400, ignore_eos: true}),
}), 1500 * i))"""
# Around the lower part of the page, without the sidebar.
CLIP = {"x": 268, "y": 540, "width": 852, "height": 160, "scale": 1}
LOAD_S = 8.0  # then some requests have ended, and others run


def main() -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(prog="python -m tests.webui.screenshots")
    parser.add_argument("url")
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    browser = Browser()
    try:
        _take(browser, given.url.rstrip("/"), given.folder)
    finally:
        browser.close()


def _take(browser: Browser, url: str, folder: Path) -> None:
    browser.emulate(size=(1120, 700))
    browser.open(url + "/")
    browser.until("document.querySelector('#model').options.length > 0")
    browser.until("document.querySelector('#status').hidden")
    browser.click("#input")
    browser.type(QUESTION)
    browser.press("Enter")
    browser.until("document.querySelector('.assistant .buttons') !== null")
    browser.screenshot(folder / "chat.png")
    browser.emulate(dark=True, size=(1120, 700))
    browser.screenshot(folder / "chat-dark.png")
    browser.emulate(size=(390, 780))
    browser.screenshot(folder / "chat-phone.png")
    browser.emulate(size=(1120, 700))
    browser.run("location.hash = '#machine'")
    browser.run(LOAD)
    time.sleep(LOAD_S)
    browser.screenshot(folder / "machine.png")
    browser.run("location.hash = '#chat'")
    if "picture" in browser.run("document.querySelector('#attach').ariaLabel"):
        _take_scan(browser, folder)
    print(json.dumps({"errors": browser.console, "requests": sorted(set(browser.urls))}, indent=1))


def _take_scan(browser: Browser, folder: Path) -> None:
    browser.click("#new")
    scan, pages = folder / "invoice-2214.png", folder / "contract.pdf"
    scan.write_bytes(saved(invoice()))
    pages.write_bytes(document(3))
    browser.choose_files("#attach-file", scan, pages)
    browser.until("document.querySelectorAll('.chip small').length === 2")
    browser.until("!document.querySelector('.reading')")
    browser.click("#input")
    browser.type("What is the total of the invoice, and does the contract allow it?")
    browser.screenshot(folder / "pictures.png", CLIP)


if __name__ == "__main__":
    main()
