"""What a person does on the chat page, and fixtures with the page of a scripted server."""

import base64
import json
import struct
import threading
from contextlib import contextmanager

import pytest

from cpuserve.testing.script import TOKENS_PER_OUTPUT
from tests.clients.scripted import scripted_server, tokenizer
from tests.helpers.patience import wait_until
from tests.webui.chromium import Browser, executable

WORDS = [f"word{i}" for i in range(400)]
LONG = "[[say " + " ".join(WORDS) + "]]"
CHAT = "/v1/chat/completions"
BUSY = "document.querySelector('.running') !== null"
IDLE = "document.querySelector('.running') === null"
ALL = "import('/webui/history.js').then(history => history.loadAll())"
LOADED = "document.querySelector('#model').options.length > 0"
LAST = "[...document.querySelectorAll('.message.assistant')].at(-1)"


# How the page before this one stored conversations, and exported them.
MAKE = """
const message = (n, i, parent, text) => ({id: `m${n}x${i}`, parent, text, images: [], files: [],
  thought: '', calls: [], created: 1.7e12 + i, role: i % 2 ? 'assistant' : 'user',
  ...(i % 2 ? {finish: 'stop', model: 'scripted'} : {})});
const conversation = (n, size) => {
  const messages = {};
  let parent = null;
  for (let i = 0; i < size; i += 1) {
    const text = `Text ${n} ${i}: **bold**, \\`code\\`.\\n\\n- one\\n- two\\n\\n$$\\\\frac{a}{b}$$`;
    const one = message(n, i, parent, text);
    messages[one.id] = one;
    parent = one.id;
  }
  const updated = 1.7e12 + n * 1000;
  return {id: `c${n}`, title: `Conversation ${n}`, updated, system: '', messages, head: parent};
};
const file = (conversations) =>
  JSON.stringify({format: 'cpuserve-conversations', version: 1, conversations});
const choose = (text) => {
  const input = document.querySelector('#import-file');
  const data = new DataTransfer();
  data.items.add(new File([text], 'conversations.json', {type: 'application/json'}));
  input.files = data.files;
  input.dispatchEvent(new Event('change'));
};
"""


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
    browser.server = server
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
        browser.run("indexedDB.deleteDatabase('cpuserve-drafts')")
    browser.open(url + "/?" + base64.urlsafe_b64encode(struct.pack("d", id(url))).decode())
    browser.until(LOADED)


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


def reload(page):
    """Load the page again where it is."""
    page.call("Page.navigate", url=page.run("location.href"))
    page.until("document.querySelector('#model')?.options.length > 0")


def stored(page):
    """Return the conversations that the browser has stored."""
    return page.run(ALL)


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


def begin_long(page):
    """Send a message with a long response, and wait for its beginning.

    The server waits in the first quarter of the response until the page shows the beginning: a
    browser on a busy machine might show nothing before the end.
    """
    model, shown = page.server.script, threading.Event()
    outputs, tokens = model._outputs, tokenizer().encode(" ".join(WORDS[:100]))
    last = len(tokens) // TOKENS_PER_OUTPUT

    def held(*given):
        parts = outputs(*given)
        for _ in range(last):
            yield next(parts)  # an output
            yield next(parts)  # the pause after it
        while not shown.is_set():
            yield 0.01
        yield from parts

    model._outputs = held
    try:
        write(page, LONG)
        page.until(f"{BUSY} && {LAST}.innerText.includes('word60')")
    finally:
        shown.set()
        del model._outputs


def choose(page, conversations):
    """Import the conversations of a JavaScript expression."""
    page.run(f"(() => {{ {MAKE} choose(file({conversations})); }})()")


def messages_of(conversation):
    """Return an expression for the stored messages of a conversation: a promise of a list."""
    found = f"all.find(one => one.id === {json.dumps(conversation)})"
    return f"{ALL}.then(all => Object.values({found}.messages))"


@contextmanager
def at_once(page):
    """In the block, the server writes the rest of its responses without pauses."""
    script = page.server.script
    pace_s, script.pace_s = script.pace_s, 0.0
    try:
        yield
    finally:
        script.pace_s = pace_s


def shows(page, text):
    """Wait until the last response has a text and has ended; nothing looks at the rest of it."""
    with at_once(page):
        wait_for_response(page, text)


def wait_for_response(page, text):
    """Wait until the last response of any server has a text and has ended."""
    page.until(f"{LAST}?.innerText.includes({json.dumps(text)}) && {IDLE}")


def count_of(page, selector):
    """Return the number of elements that a selector finds."""
    return page.run(f"document.querySelectorAll({json.dumps(selector)}).length")


def choose_model(page, name):
    """Select a model as the user does."""
    page.run(
        f"document.querySelector('#model').value = {json.dumps(name)};"
        "document.querySelector('#model').dispatchEvent(new Event('change'))"
    )


def set_field(page, label, value):
    """Change a field of the settings, which its label begins with."""
    page.run(
        f"""(() => {{
          const fields = [...document.querySelectorAll('.field')];
          const field = fields.find(f => f.innerText.startsWith({json.dumps(label)}));
          const input = field.querySelector('input, textarea, select');
          input.value = {json.dumps(value)};
          input.dispatchEvent(new Event('input'));
          input.dispatchEvent(new Event('change'));
        }})()"""
    )


def more(page, conversation, action):
    """Click one of the actions of a conversation's row."""
    page.click(f"#c-{conversation} .more")
    names = page.run("[...document.querySelectorAll('.row-actions button')].map(b => b.innerText)")
    page.click(".row-actions button", names.index(action))
