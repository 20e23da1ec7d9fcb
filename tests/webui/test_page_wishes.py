"""Wishes for chat pages: names, pins, dates, progress, options of a conversation, drafts."""

import asyncio
import json

import pytest

from cpuserve.engine.ipc import Output
from tests.clients.scripted import scripted_server
from tests.webui.visit import (
    ALL,
    BUSY,
    LAST,
    LONG,
    browser,
    chats,
    choose,
    choose_model,
    conversation_id,
    count_of,
    last_text,
    more,
    open_again,
    open_page,
    page,
    say,
    server,
    set_field,
    shows,
    stored,
    wait_for_response,
    write,
)

__all__ = ["browser", "page", "server"]  # fixtures

DAY_MS = 86_400_000


def group_of(page, conversation):
    return page.run(
        f"document.querySelector('#c-{conversation}')"
        ".closest('section').querySelector('h2').innerText"
    )


@pytest.mark.deep
def test_a_conversation_can_be_renamed_and_pinned(page, server):
    say(page, "[[say Hi.]]")
    one = conversation_id(page)
    more(page, one, "Rename")
    page.until("document.activeElement.classList.contains('rename')")
    page.run("document.activeElement.select()")
    page.type("Plans for the summer")
    page.press("Enter")
    title = f"document.querySelector('#c-{one} .title').innerText"
    page.until(f"{title} === 'Plans for the summer'")
    page.click("#new")
    say(page, "[[say Newer.]]")
    assert group_of(page, one) == "Today"
    more(page, one, "Pin")
    page.until("document.querySelector('.conversations h2').innerText === 'Pinned'")
    assert group_of(page, one) == "Pinned"
    page.until(f"{ALL}.then(all => all.find(c => c.id === {json.dumps(one)}).pinned)")
    open_again(page, server.url)
    page.until(f"document.querySelector('#c-{one}') !== null")
    assert page.run(title) == "Plans for the summer"
    more(page, one, "Unpin")
    assert group_of(page, one) == "Today"
    more(page, one, "Rename")
    page.type("not this")
    page.press("Escape")
    page.until(f"{title} === 'Plans for the summer'")


@pytest.mark.deep
def test_conversations_are_listed_by_date(page):
    dated = "[0, 1, 4, 60].map((days, i) => ({...conversation(7000 + i, 2), "
    dated += f"updated: new Date().setHours(0, 0, 0, 0) + 1000 - days * {DAY_MS}}}))"
    choose(page, dated)
    page.until("document.querySelector('#c-c7003') !== null")
    groups = [group_of(page, f"c700{i}") for i in range(4)]
    assert groups[:3] == ["Today", "Yesterday", "Last 7 days"]
    assert groups[3][-4:].isdigit()  # a month with its year
    page.click("#c-c7000 .open")
    page.until(f"{LAST}?.querySelector('time') !== null")


@pytest.mark.deep
@pytest.mark.parametrize("width", [1280, 390])
def test_titles_show_more_than_their_first_words(page, width):
    page.emulate(size=(width, 800))
    title = "How do I merge two sorted lists in Python 3?"
    say(page, title)
    if width < 600:
        page.click("#menu")
    seen = page.run(
        "(() => { const e = document.querySelector('.conversations [aria-current] .title');"
        "return [e.innerText, e.scrollHeight - e.clientHeight]; })()"
    )
    assert seen[0] == title
    assert seen[1] <= 1  # nothing of it is hidden
    if width < 600:
        page.press("Escape")
    page.emulate(size=(1280, 800))


def test_the_progress_of_a_long_prompt_is_shown(browser):
    with scripted_server() as server:
        step, go = asyncio.Event(), asyncio.Event()
        real = server.engine.script

        def slowly(engine, number, prompt, params):
            half = len(prompt) // 2
            yield Output(number, [], cached_tokens=0, scheduled=1.0, processed=half // 2)
            yield 0.05
            yield Output(number, [], cached_tokens=0, scheduled=1.0, processed=half)
            yield step
            yield Output(number, [], cached_tokens=0, scheduled=1.0, processed=len(prompt) - 1)
            yield go
            yield from real(engine, number, prompt, params)

        server.engine.script = slowly
        open_page(browser, server.url)
        write(browser, "[[say Read.]] " + "word " * 400)
        browser.until(f"{LAST}?.querySelector('.progress')?.innerText.includes('left')")
        browser.until(
            f"(({{value, max}}) => value === Math.floor(max / 2))({LAST}.querySelector('progress'))"
        )
        assert "of" in browser.run(f"{LAST}.querySelector('.progress').innerText")
        step.set()
        go.set()
        wait_for_response(browser, "Read.")
        assert browser.run(f"{LAST}.querySelector('.progress').hidden")


@pytest.mark.deep
def test_how_full_the_context_is_is_shown(browser):
    with scripted_server(max_model_len=256) as server:
        open_page(browser, server.url)
        assert browser.run("document.querySelector('#context').hidden")
        say(browser, "[[say Hi.]] " + "word " * 60)
        text = browser.run("document.querySelector('#context-text').innerText")
        figures = stored(browser)[-1]
        figures = next(m["figures"] for m in figures["messages"].values() if "figures" in m)
        used = figures["prompt"] + figures["tokens"]
        assert f"{used} of 256 tokens" in text
        assert f"{round(100 * used / 256)} %" in text
        say(browser, "[[say Hi.]] " + "word " * 60)
        say(browser, "[[say Hi.]] " + "word " * 60)
        browser.until("document.querySelector('#context').classList.contains('full')")
        browser.click("#new")
        assert browser.run("document.querySelector('#context').hidden")


def test_a_reader_who_has_scrolled_up_can_go_back_to_the_newest_text(page):
    at_end = (
        "(({scrollHeight, scrollTop, clientHeight}) => scrollHeight - scrollTop - clientHeight)"
        "(document.querySelector('#scroller'))"
    )
    write(page, LONG + " again" * 300)
    page.until(f"{BUSY} && {LAST}.innerText.includes('word150')")
    page.until(f"{at_end} < 100")
    assert page.run("document.querySelector('#newest').hidden")
    page.run("document.querySelector('#scroller').scrollTop = 0")
    page.until("!document.querySelector('#newest').hidden")
    shows(page, "word399")
    assert page.run("document.querySelector('#scroller').scrollTop") < 50  # the text did not jump
    page.click("#newest")
    page.until(f"{at_end} < 2")
    page.until("document.querySelector('#newest').hidden")
    # A message that is sent is shown, also when the text before it has just become shorter.
    write(page, LONG)
    page.until(BUSY)
    page.press("Escape")
    say(page, "[[say Last.]]" + " again" * 300)
    page.until(f"{at_end} < 2")


@pytest.mark.deep
def test_each_conversation_has_its_own_model_system_prompt_and_sampling(page, server):
    page.click("#open-settings")
    set_field(page, "System prompt", "Be brief.")
    set_field(page, "Temperature", "0.5")
    say(page, "[[say One.]]")
    one = conversation_id(page)
    page.click("#new")
    # A new conversation begins with the last values, and then goes its own way.
    set_field(page, "System prompt", "Be long.")
    set_field(page, "Temperature", "1.5")
    set_field(page, "Stop strings", "END")
    choose_model(page, "other")
    say(page, "[[say Two.]]")
    sent = chats(page, server)[-1]
    assert (sent["model"], sent["temperature"], sent["stop"]) == ("other", 1.5, ["END"])
    assert sent["messages"][0]["content"] == "Be long."
    open_again(page, server.url)
    page.click(f"#c-{one} .open")
    page.until("document.querySelector('#model').value === 'scripted'")
    page.click("#open-settings")
    assert page.run("document.querySelector('#system').value") == "Be brief."
    say(page, "[[say Three.]]")
    sent = chats(page, server)[-1]
    assert (sent["model"], sent["temperature"]) == ("scripted", 0.5)
    assert "stop" not in sent
    assert sent["messages"][0]["content"] == "Be brief."


def test_a_response_can_be_edited_and_continued(page, server):
    say(page, "[[say One two three four five.]]")
    page.click("[aria-label='Edit the response']")
    page.run("document.activeElement.value = 'One two'")
    page.click(".edit .primary")
    page.until(f"{LAST}.innerText.includes('2/2')")
    assert last_text(page) == "One two"
    assert "edited" in page.run(f"{LAST}.querySelector('.figures').innerText")
    say(page, "[[say Next.]]")
    assert chats(page, server)[-1]["messages"][1]["content"] == "One two"
    page.click("[aria-label='Edit the response']", 1)
    page.run("document.activeElement.value = 'Ne'")
    page.click(".edit button", 1)
    shows(page, "Next.")
    sent = chats(page, server)[-1]
    assert sent["continue_final_message"] is True
    assert sent["messages"][-1] == {"role": "assistant", "content": "Ne"}


@pytest.mark.deep
def test_a_conversation_is_exported_as_markdown(page):
    say(page, "[[think Easy.]][[say Take ```this``` as it is.]]")
    page.run(
        "window.files = []; const real = URL.createObjectURL;"
        "URL.createObjectURL = (blob) => { window.files.push(blob); return real(blob); };"
        "HTMLAnchorElement.prototype.click = function () { window.named = this.download; }"
    )
    more(page, conversation_id(page), "Markdown")
    text = page.run("window.files[0].text()")
    assert page.run("window.named").endswith(".md")
    assert text.startswith("# [[think Easy.]][[say Take")
    assert "## You\n\n[[think Easy.]]" in text
    assert "## scripted\n\n> Easy.\n\nTake ```this``` as it is.\n" in text


@pytest.mark.deep
def test_drafts_belong_to_their_conversations_and_survive_a_reload(page, server, tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("Notes.", encoding="utf-8")
    say(page, "[[say One.]]")
    one = conversation_id(page)
    page.click("#input")
    page.type("for the first")
    page.choose_files("#attach-file", file)
    page.until("document.querySelectorAll('.chip').length === 1")
    page.click("#new")
    assert page.run("document.querySelector('#input').value") == ""
    assert count_of(page, ".chip") == 0
    page.type("for a new one")
    page.click(f"#c-{one} .open")
    assert page.run("document.querySelector('#input').value") == "for the first"
    assert count_of(page, ".chip") == 1
    open_again(page, server.url)
    page.until("document.querySelector('#input').value === 'for the first'")
    page.click("#new")
    assert page.run("document.querySelector('#input').value") == "for a new one"
    say(page, " [[say Sent.]]")
    page.click("#new")
    assert page.run("document.querySelector('#input').value") == ""


@pytest.fixture
def small(browser):
    """The page of a server with a context of 512 tokens."""
    with scripted_server(max_model_len=512) as server:
        browser.server = server
        open_page(browser, server.url)
        yield server


DIALOG = "document.querySelector('#fit-dialog')"


def fill(browser, turns=4):
    for number in range(turns):
        say(browser, f"[[say Reply {number}.]] " + "word " * 80)


def test_a_message_that_does_not_fit_is_said_and_old_ones_can_be_left_out(browser, small):
    fill(browser)
    sent = len(chats(browser, small))
    write(browser, "[[say Fits.]] " + "word " * 120)
    browser.until(f"{DIALOG}.open")
    assert "The context of the model has 512" in browser.run(f"{DIALOG}.innerText")
    assert len(chats(browser, small)) == sent
    browser.click("#fit-dialog button[value='']")
    browser.until(f"!{DIALOG}.open")
    assert browser.run("document.querySelector('#input').value").startswith("[[say Fits.]]")
    browser.click("#input")
    browser.press("Enter")
    browser.until(f"{DIALOG}.open")
    browser.click("#fit-dialog .primary")
    shows(browser, "Fits.")
    asked = chats(browser, small)[-1]["messages"]
    assert 1 < len(asked) < 9
    assert asked[0]["role"] == "user"
    # The messages stay, and the line between them says so.
    assert count_of(browser, ".message") == 10
    browser.click(".left-out button")
    browser.until("document.querySelector('.left-out') === null")


@pytest.mark.deep
def test_an_edit_that_does_not_fit_is_said_and_stays(browser, small):
    say(browser, "[[say Hi.]]")
    browser.click(".message.user [aria-label='Edit the message']")
    browser.type("word " * 700)
    browser.press("Enter")
    browser.until(f"{DIALOG}.open")
    browser.click("#fit-dialog button[value='']")
    browser.until(f"!{DIALOG}.open")
    assert len(browser.run("document.querySelector('.edit textarea').value")) > 3000
    assert len(chats(browser, small)) == 1


@pytest.mark.deep
def test_a_message_that_is_too_long_alone_is_said(browser, small):
    write(browser, "word " * 700)
    browser.until(f"{DIALOG}.open")
    assert "The message alone is too long" in browser.run(f"{DIALOG}.innerText")
    assert count_of(browser, "#fit-dialog button[value=shorten]") == 0
    browser.press("Escape")
    browser.until(f"!{DIALOG}.open")
    assert len(browser.run("document.querySelector('#input').value")) > 3000
    assert chats(browser, small) == []


def test_a_full_context_says_what_to_do_and_an_empty_reply_too(browser, small):
    fill(browser)
    write(browser, "[[say Late.]] " + "word " * 300)
    browser.until(f"{DIALOG}.open")
    browser.click("#fit-dialog button[value=anyway]")
    browser.until(f"{LAST}.innerText.includes('The context is full')")
    browser.click(".trouble button")  # Leave out old messages
    browser.until("document.querySelector('.left-out') !== null")
    assert "The context is full" not in browser.run(f"{LAST}.innerText")
    browser.click(".trouble button")  # Retry
    shows(browser, "Late.")
    browser.click("#new")
    say(browser, "[[say ]]")
    assert "The model returned an empty response." in browser.run(f"{LAST}.innerText")
    assert "Retry" in browser.run(f"{LAST}.innerText")
