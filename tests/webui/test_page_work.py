"""The chat page loses no work: reloads, several tabs, deletions, failures, other conversations."""

import pytest

from tests.clients.scripted import scripted_server
from tests.webui.visit import (
    BUSY,
    CHAT,
    IDLE,
    LAST,
    LONG,
    at_once,
    before_scripts,
    begin_long,
    browser,
    chats,
    conversation_id,
    count_of,
    last_text,
    messages_of,
    open_again,
    open_page,
    page,
    reload,
    say,
    server,
    shows,
    stored,
    write,
)

__all__ = ["browser", "page", "server"]  # fixtures

TEXTS = "[...document.querySelectorAll('.message > .prose')].map((e) => e.innerText.trim())"


def replies(page, conversation):
    """Return the responses of a stored conversation."""
    one = next(each for each in stored(page) if each["id"] == conversation)
    return [m for m in one["messages"].values() if m["role"] == "assistant"]


@pytest.fixture
def held(server, monkeypatch):
    """held() lets a response go on so slowly that it cannot end; held.undo() as before."""

    def hold():
        monkeypatch.setattr(server.script, "pace_s", 2.0)

    hold.undo = monkeypatch.undo
    return hold


def test_a_reload_keeps_what_has_streamed_and_the_response_can_be_continued(page, server, held):
    begin_long(page)
    held()
    one = conversation_id(page)
    open_again(page, server.url)
    page.until(f"{LAST}?.querySelector('.trouble')?.innerText.includes('Stopped')")
    assert conversation_id(page) == one
    assert "word60" in last_text(page)
    assert "word399" not in last_text(page)
    held.undo()
    page.click(".trouble button")
    shows(page, "word399")
    words = last_text(page).split()
    assert words == [f"word{i}" for i in range(400)]
    assert page.run(f"{LAST}.querySelector('.trouble')") is None


@pytest.mark.parametrize(
    "more", [0, pytest.param(9, marks=pytest.mark.deep)], ids=["once", "nine times more"]
)
def test_a_reload_keeps_all_text_of_a_stream(page, server, more):
    for number in range(1 + more):
        write(page, LONG)
        page.until(f"{BUSY} && {LAST}.innerText.includes('word{3 + 7 * number}')")
        shown = last_text(page)
        reload(page)
        page.until("document.querySelector('.trouble')?.innerText.includes('Stopped')")
        assert last_text(page).startswith(shown)
        page.click("#new")


# Storing takes longer than the page lives.
ENDLESS = """(() => {
  IDBObjectStore.prototype.put = () => {};
  const real = Object.getOwnPropertyDescriptor(IDBTransaction.prototype, 'oncomplete').set;
  Object.defineProperty(IDBTransaction.prototype, 'oncomplete', {
    set(done) { if (this.mode === 'readonly') real.call(this, done); },
  });
})()"""


def test_a_question_that_is_being_stored_survives_a_reload(page, server, held):
    with before_scripts(page, ENDLESS):
        open_page(page, server.url)
        held()
        write(page, LONG)
        page.until(BUSY)
        reload(page)
    open_again(page, server.url)
    page.until(f"{TEXTS}[0]?.startsWith('[[say word0')")


@pytest.mark.deep
def test_a_tab_that_ends_without_a_word_leaves_a_stopped_response(page, server, held):
    begin_long(page)
    held()
    one = conversation_id(page)
    # The tab stores while it streams; nothing runs in it when it is killed.
    page.until(f"{messages_of(one)}.then(all => all.at(-1).text.length > 20)")
    assert replies(page, one)[-1]["state"] == "streaming"
    page.run("window.addEventListener('pagehide', (e) => e.stopImmediatePropagation(), true)")
    open_again(page, server.url)
    page.until(f"{LAST}?.querySelector('.trouble')?.innerText.includes('Stopped')")
    assert replies(page, one)[-1]["state"] == "stopped"


def test_a_stopped_response_can_be_continued(page, server):
    begin_long(page)
    page.press("Escape")
    page.until(f"{IDLE} && {LAST}.querySelector('.trouble') !== null")
    assert "Stopped" in page.run(f"{LAST}.querySelector('.trouble').innerText")
    page.click(".trouble button")
    shows(page, "word399")
    assert last_text(page).split() == [f"word{i}" for i in range(400)]
    assert chats(page, server)[-1]["continue_final_message"] is True


def test_a_response_goes_on_while_another_conversation_is_shown(page, server):
    begin_long(page)
    one = conversation_id(page)
    page.click("#new")
    say(page, "[[say Short.]]")
    with at_once(page):
        page.until(f"document.querySelector('#c-{one} .mark.unread') !== null")
    assert count_of(page, ".message") == 2
    page.click(f"#c-{one} .open")
    page.until(f"{LAST}?.innerText.includes('word399')")
    assert page.run(f"{LAST}.querySelector('.trouble')") is None
    assert replies(page, one)[-1]["state"] == "done"
    assert server.context.metrics.active == 0


def test_the_state_of_a_message_is_stored(page, server, held):
    begin_long(page)
    held()
    one = conversation_id(page)
    assert replies(page, one)[-1]["state"] == "streaming"
    page.press("Escape")
    page.until(IDLE)
    held.undo()
    say(page, "[[say Fine.]]")
    say(page, "[[nothing that the script knows")
    page.run("window.real = window.fetch; window.fetch = () => Promise.reject(new Error('no'))")
    write(page, "Are you there?")
    page.until("document.querySelectorAll('.trouble .wrong').length === 1")
    page.run("window.fetch = window.real")
    states = [m["state"] for m in replies(page, one)]
    page.until(f"{messages_of(one)}.then(all => all.at(-1).state === 'failed')")
    states = [m["state"] for m in replies(page, one)]
    assert states == ["stopped", "done", "done", "failed"]


def test_a_turn_that_failed_is_not_in_the_next_prompt(page, server):
    say(page, "[[say One.]]")
    page.run("window.real = window.fetch; window.fetch = () => Promise.reject(new Error('no'))")
    write(page, "This one fails.")
    page.until("document.querySelector('.trouble .wrong') !== null")
    assert "not sent" in page.run("document.querySelector('.trouble').innerText")
    page.run("window.fetch = window.real")
    say(page, "[[say Two.]]")
    sent = chats(page, server)[-1]["messages"]
    assert [(m["role"], m["content"]) for m in sent] == [
        ("user", "[[say One.]]"),
        ("assistant", "One."),
        ("user", "[[say Two.]]"),
    ]


@pytest.mark.deep
def test_a_question_whose_response_was_stopped_at_once_joins_the_next_one(page, server):
    page.run(
        "window.real = window.fetch;"
        "window.fetch = (path, init) => new Promise((resolve, reject) =>"
        " init?.signal?.addEventListener('abort', () => reject(new Error('aborted'))))"
    )
    write(page, "First part.")
    page.until(BUSY)
    page.press("Escape")
    page.until(f"{IDLE} && document.querySelector('.trouble') !== null")
    page.run("window.fetch = window.real")
    say(page, "[[say Whole.]]")
    sent = chats(page, server)[-1]["messages"]
    assert sent == [{"role": "user", "content": "First part.\n\n[[say Whole.]]"}]


def test_deleted_messages_can_be_put_back(page):
    say(page, "[[say One.]]")
    say(page, "[[say Two.]]")
    one = conversation_id(page)
    page.click(".message.user [aria-label='Delete from here']")
    page.until("document.querySelectorAll('.message').length === 0")
    assert "4 messages" in page.run("document.querySelector('#notice').innerText")
    page.click("#notice .act")
    page.until("document.querySelectorAll('.message').length === 4")
    assert last_text(page) == "Two."
    page.until(f"{messages_of(one)}.then(all => all.length === 4)")


@pytest.mark.deep
def test_a_deleted_conversation_can_be_put_back(page, server):
    say(page, "[[say Keep.]] giraffe")
    one = conversation_id(page)
    page.click(f"#c-{one} .more")
    page.click(".row-actions button", 3)
    page.until(f"document.querySelector('#c-{one}') === null")
    page.until("document.querySelectorAll('.message').length === 0")
    page.click("#notice .act")
    page.until(f"{LAST}?.innerText.includes('Keep.')")
    open_again(page, server.url)
    page.until(f"{LAST}?.innerText.includes('Keep.')")


@pytest.fixture
def two_tabs(page, server):
    """Two tabs with the same conversation; the first one is in use."""
    say(page, "[[say Hello.]]")
    one = conversation_id(page)
    page.new_tab()
    open_page(page, server.url, clear=False)
    page.click(f"#c-{one} .open")
    page.until(f"{LAST}?.innerText.includes('Hello.')")
    page.use_tab(0)
    yield page
    page.close_tab()


def test_two_tabs_keep_the_messages_of_each_other(two_tabs, server):
    page = two_tabs
    say(page, "[[say From the first.]]")
    page.use_tab(1)
    page.until(f"{TEXTS}.includes('From the first.')")
    say(page, "[[say From the second.]]")
    page.use_tab(0)
    page.until(f"{TEXTS}.includes('From the second.')")
    expected = ["[[say Hello.]]", "Hello.", "[[say From the first.]]", "From the first."]
    expected += ["[[say From the second.]]", "From the second."]
    assert page.run(TEXTS) == expected
    one = next(each for each in stored(page) if each["id"] == conversation_id(page))
    assert [m["text"] for m in one["messages"].values()] == expected


@pytest.mark.deep
def test_tabs_that_write_at_the_same_time_lose_nothing(two_tabs, server):
    page = two_tabs
    one = conversation_id(page)
    # Neither tab hears the other one: each stores what it has.
    for tab in (0, 1):
        page.use_tab(tab)
        page.run("BroadcastChannel.prototype.postMessage = () => {}")
    for tab in (0, 1):
        page.use_tab(tab)
        write(page, f"[[say From tab {tab}.]]")
    for tab in (0, 1):
        page.use_tab(tab)
        page.until(f"{LAST}?.innerText.includes('From tab {tab}.') && {IDLE}")
    texts = f"{messages_of(one)}.then(all => all.map(m => m.text))"
    for tab in (0, 1):
        page.until(f"{texts}.then(all => all.includes('From tab {tab}.'))")
    assert len(page.run(texts)) == 6


@pytest.mark.deep
def test_a_tab_shows_and_stops_what_another_tab_streams(two_tabs, held):
    page = two_tabs
    begin_long(page)
    held()
    page.use_tab(1)
    page.until(f"{BUSY} && {LAST}.innerText.includes('word20')")
    page.click("#send")  # it says Stop
    page.until(IDLE)
    page.use_tab(0)
    page.until(f"{IDLE} && {LAST}.querySelector('.trouble') !== null")
    assert "word399" not in last_text(page)


@pytest.mark.deep
def test_a_conversation_that_another_tab_deletes_leaves_this_tab(two_tabs, server):
    page = two_tabs
    one = conversation_id(page)
    page.use_tab(1)
    page.click(f"#c-{one} .more")
    page.click(".row-actions button", 3)
    page.use_tab(0)
    page.until(f"document.querySelector('#c-{one}') === null")
    page.until("document.querySelectorAll('.message').length === 0")
    page.use_tab(1)
    page.click("#notice .act")
    page.use_tab(0)
    page.until(f"document.querySelector('#c-{one}') !== null")


MERGES = """(async () => {
  const c = await import('/webui/conversation.js');
  const first = c.newConversation('');
  const add = (to, parent, text) => c.addMessage(to, parent, {role: 'user', text});
  const root = add(first, null, 'root');
  const second = structuredClone(first);
  const later = () => new Promise((resolve) => setTimeout(resolve, 3));
  await later();
  add(first, root.id, 'one'); c.setField(first, 'title', 'new title');
  await later();
  add(second, root.id, 'two'); c.change(second.messages[root.id], {text: 'root, changed'});
  await later();
  const gone = add(second, second.head, 'gone'); c.removeMessage(second, gone);
  const late = structuredClone(first); late.messages[gone.id] = structuredClone(gone);
  const left = structuredClone(first), right = structuredClone(second);
  c.merge(left, second); c.merge(right, first); c.merge(late, second);
  const texts = (each) => Object.values(each.messages).map((m) => m.text).sort();
  const seen = (each) => [texts(each), each.title];
  const follows = structuredClone(second); add(follows, follows.head, 'three');
  c.merge(second, follows);
  return {left: seen(left), right: seen(right), late: seen(late), again: c.merge(left, right),
          kept: left.head === first.head, followed: second.head === follows.head};
})()"""


@pytest.mark.deep
def test_a_merge_takes_the_newer_of_each_and_does_not_depend_on_the_order(page):
    merged = page.run(MERGES)
    expected = [["one", "root, changed", "two"], "new title"]
    assert merged["left"] == merged["right"] == merged["late"] == expected
    assert merged["again"] is False
    assert merged["kept"]
    assert merged["followed"]


@pytest.mark.deep
def test_a_draft_and_the_conversation_survive_a_restart_of_the_server(browser):
    with scripted_server(pace_s=0.0) as server:
        port = server.port
        open_page(browser, server.url)
        say(browser, "[[say Hi.]]")
        browser.click("#input")
        browser.type("not sent yet")
        browser.until("localStorage.getItem('cpuserve.drafts')?.includes('not sent yet')")
    with scripted_server(pace_s=0.0, port=port) as server:
        open_again(browser, server.url)
        browser.until(f"{LAST}?.innerText.includes('Hi.')")
        browser.until("document.querySelector('#input').value === 'not sent yet'")
        assert [x for x in server.exchanges if x.path == CHAT] == []
