#!/usr/bin/env python3
"""First paint of the chat page in a headless Chromium, from the performance API; records.

usage: bench_page.py URL [--rounds 20]

URL is a server on this machine. Each round opens a new tab, once with an empty cache of the browser
(`first_paint`) and once more with the cache of the first load (`first_paint_again`).
The first round does not count. `ready` is the time until the list of models is shown. `bytes` and
`requests` count the transfers of the first load. Times are milliseconds since the navigation began.
"""

import argparse
import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from cpuserve.bench.driver import first_model
from cpuserve.bench.observe import where
from cpuserve.bench.schema import record
from tests.webui.chromium import Browser, executable

READY = "document.querySelector('#model')?.options.length > 0"
FIGURES = """(() => {
  const entries = [...performance.getEntriesByType('resource'),
    ...performance.getEntriesByType('navigation')];
  return {
    paint: performance.getEntriesByName('first-contentful-paint')[0]?.startTime,
    now: performance.now(),
    bytes: entries.reduce((sum, each) => sum + each.transferSize, 0),
    requests: entries.length,
  };
})()"""


def load(browser, url):
    """Open the page in a new tab, and return its times and transfers."""
    browser.open("about:blank#")
    browser.call("Page.navigate", url=url)
    browser.until(READY)
    ready = browser.run(FIGURES)
    browser.until("performance.getEntriesByName('first-contentful-paint').length > 0")
    return {**browser.run(FIGURES), "now": ready["now"]}


async def observed(url):
    """Return the host of the record: the machine where the server runs."""
    return await where(await first_model(url.rstrip("/")))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--rounds", type=int, default=20)
    flags = parser.parse_args()
    if executable() is None:
        sys.exit("chromium is not installed (apt-get install chromium)")
    url = flags.url.rstrip("/") + "/"
    found = []
    browser = Browser()
    try:
        for _ in range(flags.rounds + 1):
            browser.call("Network.clearBrowserCache")
            found.append((load(browser, url), load(browser, url)))
    finally:
        browser.close()
    others = {each for each in browser.urls if not each.startswith((url, "data:", "about:"))}
    if others:
        sys.exit(f"the page has sent requests to others: {sorted(others)}")
    here = asyncio.run(observed(url))
    for metric, unit, values in (
        ("first_paint", "ms", [first["paint"] for first, _ in found[1:]]),
        ("first_paint_again", "ms", [again["paint"] for _, again in found[1:]]),
        ("ready", "ms", [first["now"] for first, _ in found[1:]]),
        ("bytes", "bytes", [first["bytes"] for first, _ in found[1:]]),
        ("requests", "requests", [first["requests"] for first, _ in found[1:]]),
    ):
        print(record(metric, unit, values, here, better="less").to_json())


if __name__ == "__main__":
    main()
