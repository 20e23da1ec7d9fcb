"""The chat page in a headless Chromium, with the scripted server: what a person does on it.

Most of these tests are deep: each waits for a browser, which takes a second of CPU time.
"""

import json
import struct
import zlib

import pytest

from tests.clients.scripted import scripted_server
from tests.webui.visit import (
    ALL,
    IDLE,
    LAST,
    LOADED,
    LONG,
    begin_long,
    browser,
    chats,
    choose_model,
    count_of,
    last_text,
    open_again,
    open_page,
    page,
    say,
    server,
    set_field,
    shows,
    wait_for_response,
    write,
)

__all__ = ["browser", "page", "server"]  # fixtures


def test_a_message_is_sent_and_its_response_streams(page, server):
    say(page, "[[say Hello from the model.]]")
    assert last_text(page) == "Hello from the model."
    figures = page.run(f"{LAST}.querySelector('.figures').textContent")
    assert "first after" in figures
    assert "cached" in figures
    sent = chats(page, server)[-1]
    assert sent["messages"] == [{"role": "user", "content": "[[say Hello from the model.]]"}]
    assert sent["model"] == "scripted"
    # A rate needs a time: on a busy machine the chunks of a short response arrive together.
    say(page, LONG)
    assert "tokens/s" in page.run(f"{LAST}.querySelector('.figures').textContent")
    sent = chats(page, server)[-1]
    assert [m["role"] for m in sent["messages"]] == ["user", "assistant", "user"]


def test_escape_stops_a_response_and_keeps_its_text(page, server):
    begin_long(page)
    page.press("Escape")
    page.until(IDLE)
    shown = last_text(page)
    assert shown.startswith("word0 word1")
    assert "word399" not in shown
    page.until("document.querySelector('#send').getAttribute('aria-label') === 'Send'")
    # The server has noticed, too: it has ended the sequence.
    page.until(
        "fetch('v1/activity').then(r => r.json())"
        ".then(a => a.models[0].sequences.at(-1).state === 'abort')"
    )
    assert server.context.metrics.active == 0


def test_a_response_is_repeated_on_a_branch(page):
    say(page, "[[say One.]]")
    page.click(".message.assistant [aria-label=Regenerate]")
    page.until(f"document.querySelector('.branches')?.innerText.includes('2/2') && {IDLE}")
    page.click(".branches [aria-label='Previous branch']")
    page.until("document.querySelector('.branches').innerText.includes('1/2')")
    assert last_text(page) == "One."


@pytest.mark.deep
def test_an_edited_message_begins_a_branch(page, server):
    say(page, "[[say First.]]")
    page.click(".message.user [aria-label='Edit the message']")
    page.run("document.activeElement.select()")
    page.type("[[say Second.]]")
    page.press("Enter")
    shows(page, "Second.")
    assert [m["content"] for m in chats(page, server)[-1]["messages"]] == ["[[say Second.]]"]
    page.click(".message.user .branches [aria-label='Previous branch']")
    page.until(f"{LAST}?.innerText.includes('First.')")


@pytest.mark.deep
def test_the_system_prompt_and_sampling_are_sent(page, server):
    page.click("#open-settings")
    page.click("#system")
    page.type("Be brief.")
    for label, value in [
        *(("Temperature", "0.5"), ("Top-k", "7"), ("Max tokens", "50"), ("Seed", "3")),
        *(("Stop strings", "END"), ("More fields", '{"presence_penalty": 0.5}')),
    ]:
        set_field(page, label, value)
    say(page, "[[say Yes.]]")
    sent = chats(page, server)[-1]
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."}
    expected = {"temperature": 0.5, "top_k": 7, "max_tokens": 50, "seed": 3, "stop": ["END"]}
    assert {**expected, "presence_penalty": 0.5}.items() <= sent.items()


@pytest.mark.deep
def test_another_model_is_chosen(page, server):
    choose_model(page, "other")
    say(page, "[[say Yes.]]")
    assert chats(page, server)[-1]["model"] == "other"


@pytest.mark.deep
def test_thoughts_are_folded(page, server):
    say(page, "[[think It is easy.]][[say 4]]")
    assert last_text(page) == "4"
    assert page.run(f"{LAST}.querySelector('.thought').open") is False
    page.click(".message.assistant .thought summary")
    assert "It is easy." in page.run(f"{LAST}.querySelector('.thought').innerText")
    say(page, "[[say Next.]]")
    assert chats(page, server)[-1]["messages"][1]["reasoning"] == "It is easy."


def test_a_built_in_tool_runs_and_its_result_is_shown(page, server):
    page.click("#open-settings")
    page.click(".check input", 1)
    write(page, '[[call calculate {"expression": "2 * (3 + 4)^2"}]] [[say It is 98.]]')
    shows(page, "It is 98.")
    title = page.run("document.querySelector('.message.tool header').innerText")
    assert title.split()[:2] == ["calculate", "returned"]
    assert page.run("document.querySelector('.message.tool > .prose').innerText") == "98"
    sent = chats(page, server)[-1]
    assert sent["tools"][0]["function"]["name"] == "calculate"
    assert [m["role"] for m in sent["messages"]] == ["user", "assistant", "tool"]
    assert sent["messages"][2]["content"] == "98"


@pytest.mark.deep
def test_the_user_writes_the_result_of_an_own_tool(page, server):
    tools = json.dumps([{"name": "weather", "parameters": {"type": "object"}}])
    page.click("#open-settings")
    set_field(page, "Your tools", tools)
    write(page, '[[call weather {"city": "Rome"}]] [[say It is sunny.]]')
    page.until("document.querySelector('.result textarea') !== null")
    assert '"city": "Rome"' in page.run("document.querySelector('.call').innerText")
    page.click(".result textarea")
    page.type("sunny")
    page.click(".result .primary")
    shows(page, "It is sunny.")
    assert chats(page, server)[-1]["messages"][2]["content"] == "sunny"


def png(width, height):
    """Return a grey picture."""

    def chunk(kind, data):
        whole = kind + data
        return struct.pack(">I", len(data)) + whole + struct.pack(">I", zlib.crc32(whole))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = (b"\0" + b"\x80" * width) * height
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.deep
def test_a_text_file_is_sent_before_the_message(page, server, tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("The code is 42.", encoding="utf-8")
    page.choose_files("#attach-file", file)
    page.until("document.querySelectorAll('.chip').length === 1")
    say(page, "[[say Read.]]")
    text = chats(page, server)[-1]["messages"][0]["content"]
    assert text == "File notes.txt:\n```\nThe code is 42.\n```\n\n[[say Read.]]"


@pytest.mark.deep
def test_a_file_that_cannot_be_read_is_named(page, tmp_path):
    file = tmp_path / "program.bin"
    file.write_bytes(b"\x7fELF\0\0\xff")
    page.choose_files("#attach-file", file)
    page.until("document.querySelector('#notice').innerText.includes('program.bin')")
    assert count_of(page, ".chip") == 0


@pytest.mark.deep
def test_conversations_are_kept_found_and_deleted(page, server):
    say(page, "[[say About zebras.]] zebra")
    page.click("#new")
    say(page, "[[say About yaks.]] yak")
    found = "['yak', 'zebra'].every(word => all.some(c => c.title.endsWith(word)))"
    page.until(f"{ALL}.then(all => {found})")
    open_again(page, server.url)
    page.until("document.querySelectorAll('.conversations li').length >= 2")
    page.click("#search")
    page.type("zebras")
    page.until("document.querySelectorAll('.conversations li').length === 1")
    page.click(".conversations .open")
    page.until(f"{LAST}?.innerText.includes('About zebras.')")
    page.click(".conversations .more")
    page.click(".row-actions button", 3)
    page.until("document.querySelectorAll('.conversations li').length === 0")
    page.until("document.querySelectorAll('.message').length === 0")


@pytest.mark.deep
def test_an_export_can_be_imported_and_a_wrong_file_is_refused(page):
    say(page, "[[say Keep me.]]")
    result = page.run(
        """(async () => {
          const history = await import('/webui/history.js');
          const transfer = await import('/webui/transfer.js');
          const all = await history.loadAll();
          const text = transfer.exported(all);
          const again = transfer.imported(text).conversations;
          const wrong = [];
          const circle = JSON.parse(text);
          circle.conversations = circle.conversations.slice(0, 1);
          const messages = Object.values(circle.conversations[0].messages);
          messages[0].parent = messages.at(-1).id;
          for (const bad of ['', '[]', '{"format": "x"}', JSON.stringify(circle)]) {
            try { transfer.imported(bad); } catch (error) { wrong.push(error.message); }
          }
          return {same: JSON.stringify(again) === JSON.stringify(all), wrong};
        })()"""
    )
    assert result["same"]
    assert len(result["wrong"]) == 4
    assert all("no export" in text for text in result["wrong"])


def test_the_page_asks_for_the_key(browser):
    with scripted_server(http={"api_key": ("secret",)}) as server:
        browser.console.clear()
        browser.open(server.url + "/")
        browser.until("document.querySelector('#key-dialog').open")
        browser.click("#key")
        browser.type("wrong")
        browser.press("Enter")
        browser.until("!document.querySelector('#key-wrong').hidden")
        browser.run("document.querySelector('#key').value = ''")
        browser.click("#key")
        browser.type("secret")
        browser.press("Enter")
        browser.until(LOADED)
        say(browser, "[[say Welcome.]]")
        assert last_text(browser) == "Welcome."


@pytest.mark.deep
def test_a_restart_of_the_server_is_survived(browser):
    with scripted_server(pace_s=0.02) as server:
        port = server.port
        open_page(browser, server.url)
        write(browser, LONG)
        browser.until(f"{LAST}?.innerText.includes('word20')")
    browser.until("document.querySelector('.trouble .wrong') !== null")
    assert last_text(browser).startswith("word0 word1")
    browser.click(".trouble button", 1)
    browser.until("document.querySelector('.trouble .wrong')?.innerText.includes('reached')")
    with scripted_server(pace_s=0.0, port=port):
        browser.click(".trouble button")
        wait_for_response(browser, "word399")


@pytest.mark.deep
def test_the_machine_tab_is_live_under_load(page):
    page.run("location.hash = '#machine'")
    page.until("document.querySelectorAll('.core').length > 0")
    page.run(
        f"""void Promise.all([1, 2, 3].map(() => fetch('v1/chat/completions', {{
          method: 'POST',
          headers: {{'content-type': 'application/json'}},
          body: JSON.stringify({{messages: [{{role: 'user', content: {json.dumps(LONG)}}}]}}),
        }})))"""
    )
    page.until("document.querySelectorAll('.timeline .bar').length >= 3")
    page.until("[...document.querySelectorAll('.tile')][2].innerText.includes('3')")
    page.until("document.querySelector('.timeline .output') !== null")
    page.until(
        "[...document.querySelectorAll('.tile')][2].querySelector('strong').innerText === '0'"
    )
    page.run("location.hash = '#chat'")


def test_the_machine_view_says_where_arithmetic_becomes_the_limit(page):
    page.run(
        """void import('/webui/machine.js').then(({MachineView}) => {
          const view = new MachineView(document.createElement('div'));
          document.body.append(view.element);
          view.report = {live: {limits: [
            {requests: 1, tokens_per_s: 40.4, by: 'memory'},
            {requests: 8, tokens_per_s: 160, by: 'arithmetic'},
            {requests: 32, tokens_per_s: 160, by: 'arithmetic'},
          ]}};
          view.past = [{time: 1, models: [], cpus: []}];
          view.drawBandwidth(view.past[0]);
          window.limits = view.parts.bandwidth.textContent;
          view.element.remove();
        })"""
    )
    page.until("window.limits !== undefined")
    text = (
        "at most: 40 for one request, 160 for 8 requests (by arithmetic from here on), 160 for 32"
    )
    assert text in page.run("window.limits")


@pytest.mark.deep
def test_a_phone_shows_everything_without_scrolling_sideways(page):
    page.emulate(size=(390, 800))
    say(page, "[[say " + "x" * 300 + "\n\n| a | b |\n|--|--|\n| " + "y" * 200 + " | 2 |]]")
    assert page.run("document.documentElement.scrollWidth") <= 390
    page.click("#menu")
    page.until("document.querySelector('#new').getClientRects().length > 0")
    page.run("location.hash = '#machine'")
    page.until("document.querySelectorAll('.core').length > 0")
    assert page.run("document.documentElement.scrollWidth") <= 390
    page.run("location.hash = '#chat'")
    page.emulate(size=(1280, 800))
