"""What a person does on the chat page, and fixtures with the page of a scripted server."""

import base64
import struct
from contextlib import contextmanager

import pytest

from tests.clients.scripted import scripted_server
from tests.helpers.patience import wait_until
from tests.webui.chromium import Browser, executable

LONG = "[[say " + " ".join(f"word{i}" for i in range(400)) + "]]"
CHAT = "/v1/chat/completions"
BUSY = "document.querySelector('.running') !== null"
IDLE = "document.querySelector('.running') === null"
LAST = "[...document.querySelectorAll('.message.assistant')].at(-1)"


@pytest.fixture(scope="module")
def server():
    with scripted_server(pace_s=0.01, names=("scripted", "other")) as server:
        # The scripted engine has no steps: all its sequences run.
        server.engine.stats.running = 64
        yield server


@pytest.fixture(scope="module")
def browser():
    if executable() is None:
        pytest.skip("chromium is not installed")
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture
def page(browser, server):
    """The page with a new conversation and the settings of a first visit."""
    open_page(browser, server.url)
    browser.urls.clear()
    server.exchanges.clear()
    yield browser
    # The browser logs each 4xx: the scripted server reads no pictures and has no report of the CPU.
    known = ("404 (Not Found)", "400 (Bad Request)")
    assert [text for text in browser.console if not any(k in text for k in known)] == []
    assert {url.split(":")[0] for url in browser.urls if not url.startswith(server.url)} <= {"data"}


def open_page(browser, url, *, clear=True):
    browser.console.clear()
    if clear:
        # A file without scripts, so that nothing stores anything after this.
        browser.open(url + "/webui/icon.svg")
        browser.run("localStorage.clear(); sessionStorage.clear()")
    browser.open(url + "/?" + base64.urlsafe_b64encode(struct.pack("d", id(url))).decode())
    browser.until("document.querySelector('#model').options.length > 0")


@contextmanager
def before_scripts(browser, script):
    """Run a script in each document before those of the page."""
    added = browser.call("Page.addScriptToEvaluateOnNewDocument", source=script)
    yield
    browser.call("Page.removeScriptToEvaluateOnNewDocument", identifier=added["identifier"])


def open_again(page, url):
    """Load the page again, as a user who comes back to the same tab."""
    page.open("about:blank#")
    page.call("Page.navigate", url=url + "/")
    page.until("document.querySelector('#model')?.options.length > 0")


def stored(page):
    """Return the conversations that the browser has stored."""
    return page.run("import('/webui/history.js').then(history => history.loadAll())")


def conversation_id(page):
    """Return the id of the conversation that the tab shows."""
    return page.run("sessionStorage.getItem('cpuserve.open')")


def say(page, text):
    """Send a message and wait for the end of the response."""
    before = page.run("document.querySelectorAll('.message').length")
    write(page, text)
    page.until(f"document.querySelectorAll('.message').length > {before + 1} && {IDLE}")


def write(page, text):
    page.click("#input")
    page.type(text)
    page.press("Enter")


def last_text(page):
    return page.run(f"{LAST}.querySelector(':scope > .prose').innerText.trim()")


def chats(page, server):
    """Return the chat requests that succeeded, after the server has written all responses."""
    asked = page.urls.count(server.url + CHAT)

    def answered():
        return [x for x in server.exchanges if x.path == CHAT]

    wait_until(lambda: len(answered()) >= asked)
    return [x.body for x in answered() if x.status == 200]
