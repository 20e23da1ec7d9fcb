"""A table: in each state of unfinished work, after each action of the user, nothing is lost."""

import json
from contextlib import contextmanager

import pytest

from tests.clients.scripted import scripted_server
from tests.helpers.drawn import document, png
from tests.webui.test_page_pictures import CHIPS, SHOWN, attach, sent
from tests.webui.visit import (
    CHAT,
    IDLE,
    LAST,
    at_once,
    begin_long,
    browser,
    chats,
    conversation_id,
    count_of,
    last_text,
    open_page,
    page,
    reload,
    say,
    set_field,
    shows,
    write,
)

__all__ = ["browser", "page"]  # fixtures

WORDS = " ".join(f"word{i}" for i in range(400))
SETTINGS = {"System prompt": "Be brief.", "Temperature": "0.3", "Your tools": '[{"name": '}


@pytest.fixture(scope="module")
def server():
    with scripted_server(pace_s=0.01, names=("scripted", "other"), sees=True) as server:
        server.engine.stats.running = 64
        yield server


@pytest.fixture
def files(tmp_path):
    found = [tmp_path / "a.png", tmp_path / "scan.pdf", tmp_path / "notes.txt"]
    found[0].write_bytes(png())
    found[1].write_bytes(document(2))
    found[2].write_bytes("Caf\xe9".encode("latin-1"))
    return found


class Draft:
    """A message with files is in the composer."""

    def prepare(self, page, files):
        say(page, "[[say First.]]")
        page.click("#input")
        page.type("[[say Sent.]] caf\u00e9")
        attach(page, *files)
        self.chips = page.run(CHIPS)
        assert len(self.chips) == 3
        page.until("localStorage.getItem('cpuserve.drafts')?.includes('[[say Sent')")

    def is_there(self, page):
        page.until("document.querySelector('#input').value === '[[say Sent.]] caf\u00e9'")
        page.until(f"JSON.stringify({CHIPS}) === JSON.stringify({json.dumps(self.chips)})")

    def send(self, page):
        page.click("#input")
        page.press("Enter")

    def check_sent(self, page, server):
        shows(page, "Sent.")
        content = chats(page, server)[-1]["messages"][-1]["content"]
        assert [part["type"] for part in content] == ["image_url", "file", "text"]
        assert (
            content[2]["text"] == "File notes.txt:\n```\nCaf\u00e9\n```\n\n[[say Sent.]] caf\u00e9"
        )


class Edit:
    """The text and the files of a message have been changed in its form."""

    def prepare(self, page, files):
        attach(page, files[2], files[1])
        say(page, "[[say First.]]")
        page.click(".message.user [aria-label='Edit the message']")
        page.until("document.querySelectorAll('.edit .chip:not(.reading)').length === 2")
        page.run("document.activeElement.select()")
        page.type("[[say Sent.]]")
        page.click(".edit [aria-label='Remove scan.pdf']")
        before = count_of(page, ".edit .chip")
        page.choose_files(".edit input[type=file]", files[0])
        page.until(f"document.querySelectorAll('.edit .chip').length === {before + 1}")
        page.until("!document.querySelector('.edit .reading')")
        self.chips = page.run(CHIPS)
        page.until("localStorage.getItem('cpuserve.drafts')?.includes('[[say Sent')")
        page.run("document.querySelector('.edit textarea').focus()")

    def is_there(self, page):
        page.until("document.querySelector('.edit, .trouble button') !== null")
        if not count_of(page, ".edit"):
            page.click(".trouble button")
        page.until("document.querySelector('.edit textarea').value === '[[say Sent.]]'")
        page.until(f"JSON.stringify({CHIPS}) === JSON.stringify({json.dumps(self.chips)})")

    def send(self, page):
        page.click(".edit textarea")
        page.press("Enter")

    def check_sent(self, page, server):
        shows(page, "Sent.")
        assert count_of(page, ".edit") == 0
        content = chats(page, server)[-1]["messages"][-1]["content"]
        assert [part["type"] for part in content] == ["image_url", "text"]
        assert content[1]["text"] == "File notes.txt:\n```\nCaf\u00e9\n```\n\n[[say Sent.]]"


class Files:
    """A message with files has been sent."""

    def prepare(self, page, files):
        attach(page, *files)
        say(page, "[[say First.]]")
        self.shown = page.run(f"{SHOWN}.map(e => e.innerText)")
        self.parts = sent(page, page.server)

    def is_there(self, page):
        page.until(f"{SHOWN}.length === 3")
        assert page.run(f"{SHOWN}.map(e => e.innerText)") == self.shown

    def send(self, page):
        write(page, "[[say Sent.]]")

    def check_sent(self, page, server):
        shows(page, "Sent.")
        assert sent(page, server) == self.parts


class Stream:
    """A response streams."""

    def prepare(self, page, files):
        begin_long(page)
        self.seen = last_text(page)

    def is_there(self, page):
        with at_once(page):
            page.until(f"{LAST} && {IDLE}")
        assert last_text(page).startswith(self.seen)

    def send(self, page):
        if count_of(page, ".trouble button"):
            page.click(".trouble button")

    def check_sent(self, page, server):
        with at_once(page):
            page.until(IDLE)
            while count_of(page, ".trouble button"):  # a response that was cut off is continued
                page.click(".trouble button")
                page.until(IDLE)
        assert last_text(page) == WORDS


class Settings:
    """Settings have been changed; one is not complete."""

    def prepare(self, page, files):
        say(page, "[[say First.]]")
        page.click("#open-settings")
        for label, value in SETTINGS.items():
            set_field(page, label, value)

    def is_there(self, page):
        if page.run("document.querySelector('#settings').hidden"):
            page.click("#open-settings")
        for label, value in SETTINGS.items():
            fields = "[...document.querySelectorAll('.field')]"
            field = f"{fields}.find(f => f.innerText.startsWith('{label}'))"
            page.until(f"{field}.querySelector('input, textarea').value === {json.dumps(value)}")

    def send(self, page):
        write(page, "[[say Sent.]]")

    def check_sent(self, page, server):
        shows(page, "Sent.")
        body = chats(page, server)[-1]
        assert body["messages"][0] == {"role": "system", "content": "Be brief."}
        assert body["temperature"] == 0.3


@contextmanager
def reloading(page, one):
    reload(page)
    yield


@contextmanager
def escaping(page, one):
    page.press("Escape")
    page.press("Escape")
    yield


@contextmanager
def looking_elsewhere(page, one):
    page.click("#new")
    say(page, "[[say Elsewhere.]]")
    page.click(f"#c-{one} .open")
    yield


@contextmanager
def working_in_another_tab(page, one):
    """The other tab changes the same things: its draft, an edit, settings, the conversation."""
    page.new_tab()
    open_page(page, page.server.url, clear=False)
    page.until(f"document.querySelector('#c-{one}') !== null")
    page.click(f"#c-{one} .open")
    page.until(f"{LAST} !== undefined")
    page.run("document.querySelector('#input').value = ''")
    page.click("#input")
    page.type("of the other tab")
    page.click("#open-settings")
    set_field(page, "Seed", "7")
    set_field(page, "Colors", "dark")
    page.click("#new")
    page.run("document.querySelector('#input').value = ''")
    say(page, "[[say In the other tab.]]")
    page.use_tab(0)
    page.until("document.documentElement.dataset.theme === 'dark'")
    yield
    page.close_tab()
    assert page.run("JSON.parse(localStorage.getItem('cpuserve.settings')).seed") == "7"


@contextmanager
def opening_it_in_a_new_tab(page, one):
    page.new_tab()
    open_page(page, page.server.url, clear=False)
    page.click(f"#c-{one} .open")
    yield
    page.close_tab()


# Lets window.cut() end the connection of a stream.
CUT = """(() => {
  const real = window.fetch;
  window.fetch = async (path, init) => {
    const response = await real(path, init);
    if (!path.includes('chat')) return response;
    const cut = new Promise((_, reject) => { window.cut = () => reject(new TypeError('cut')); });
    const reader = response.body.getReader();
    return {ok: true, body: {getReader: () => ({read: () => Promise.race([reader.read(), cut])})}};
  };
})()"""


def offline(page, is_offline):
    page.call("Network.emulateNetworkConditions", offline=is_offline, latency=0,
              downloadThroughput=-1, uploadThroughput=-1)  # fmt: skip


STATES = {kind.__name__.lower(): kind for kind in (Draft, Edit, Files, Stream, Settings)}
ACTIONS = {
    "reload": reloading,
    "escape": escaping,
    "another conversation": looking_elsewhere,
    "another tab": working_in_another_tab,
    "a new tab": opening_it_in_a_new_tab,
}
QUICK = {("draft", "reload"), ("edit", "reload"), ("edit", "escape")}
TABLE = [
    pytest.param(state, action, marks=() if (state, action) in QUICK else pytest.mark.deep)
    for state in STATES
    for action in ACTIONS
]


@pytest.mark.parametrize(("state", "action"), TABLE)
def test_nothing_is_lost(page, server, files, state, action):
    work = STATES[state]()
    work.prepare(page, files)
    with ACTIONS[action](page, conversation_id(page)):
        work.is_there(page)
        work.send(page)
        work.check_sent(page, server)


@pytest.mark.deep
@pytest.mark.parametrize("state", STATES)
def test_nothing_is_lost_without_a_network(page, server, files, state):
    work = STATES[state]()
    page.run(CUT)
    work.prepare(page, files)
    offline(page, True)
    if state == "stream":
        page.run("window.cut()")
    else:
        work.send(page)
    page.until(f"document.querySelector('.trouble .wrong') !== null && {IDLE}")
    offline(page, False)
    del page.urls[page.urls.index(server.url + CHAT)]  # a request that the server never got
    reload(page)
    page.until("document.querySelector('.trouble button') !== null")
    page.click(".trouble button")
    work.check_sent(page, server)
    page.console.clear()  # the browser logs what it could not send
