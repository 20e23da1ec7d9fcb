"""The chat page with other networks and scripts, long histories, damaged files, no storage."""

import json

import pytest

from tests.clients.scripted import scripted_server
from tests.webui.chromium import LAN_NAME
from tests.webui.test_page import png
from tests.webui.visit import (
    LAST,
    LOADED,
    before_scripts,
    browser,
    chats,
    choose,
    choose_model,
    conversation_id,
    count_of,
    last_text,
    messages_of,
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

COUNTED = """(() => {
  window.transactions = 0;
  const real = IDBDatabase.prototype.transaction;
  IDBDatabase.prototype.transaction = function (...given) {
    window.transactions += 1;
    return real.apply(this, given);
  };
})()"""


@pytest.mark.deep
def test_code_and_messages_are_copied_over_http_from_another_machine(browser):
    with scripted_server(http={"allowed_hosts": (LAN_NAME,)}) as server:
        url = f"http://{LAN_NAME}:{server.port}"
        open_page(browser, url)
        assert browser.run("window.isSecureContext") is False
        say(browser, "[[say Take this:\n\n```py\nprint('copied')\n```\n]]")
        for selector, text in [
            (".copy", "print('copied')"),
            (".message.user [aria-label='Copy the message']", "[[say Take this:"),
        ]:
            browser.click(selector)
            browser.click("#input")
            browser.run("document.querySelector('#input').value = ''")
            browser.call(
                "Input.dispatchKeyEvent", type="keyDown", key="v", commands=["paste"], modifiers=2
            )
            browser.until(f"document.querySelector('#input').value.startsWith({json.dumps(text)})")
        assert [text for text in browser.console if "favicon" not in text] == []


@pytest.mark.deep
def test_a_copy_that_the_browser_refuses_is_said(page):
    say(page, "[[say Text.]]")
    page.run("navigator.clipboard.writeText = () => Promise.reject(new Error('denied'))")
    page.run("document.execCommand = () => false")
    page.click(".message.assistant [aria-label='Copy the message']")
    page.until("document.querySelector('#notice').innerText.includes('select the text')")


# The number of lines over which each word of a table is spread.
LINES = """[...document.querySelectorAll('.prose td, .prose th')].flatMap((cell) => {
  const walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
  const lines = [];
  while (walker.nextNode()) {
    for (const word of walker.currentNode.data.matchAll(/\\S+/g)) {
      const range = document.createRange();
      range.setStart(walker.currentNode, word.index);
      range.setEnd(walker.currentNode, word.index + word[0].length);
      lines.push(range.getClientRects().length);
    }
  }
  return lines;
})"""


@pytest.mark.deep
def test_tables_keep_their_words_whole_and_scroll(page):
    page.emulate(size=(390, 800))
    names = ["Architecture", "Quantization", "Throughput", "Requirements", "Implementation"]
    row = " | ".join(names)
    say(page, f"[[say | {row} |\n|{'---|' * 5}\n| {row} |]]")
    assert page.run(LINES) == [1] * 10
    assert page.run("document.documentElement.scrollWidth") <= 390
    page.emulate(size=(1280, 800))


@pytest.mark.deep
def test_formulas_have_a_math_font_brackets_that_stretch_and_italic_greek(page):
    say(
        page,
        r"[[say $$\left(\frac{\frac{a}{b}}{\frac{c}{d}}\right) \sum_{i=1}^{n} \alpha_i \Gamma$$]]",
    )
    seen = page.run(
        """(() => {
          const height = (e) => e.getBoundingClientRect().height;
          const math = document.querySelector('math');
          const style = getComputedStyle(math);
          const all = [...math.querySelectorAll('mo, mi')];
          const find = (text) => all.find((e) => e.textContent === text);
          return {font: style.fontFamily, size: parseFloat(style.fontSize),
            bracket: height(find('(')), fraction: height(math.querySelector('mfrac')),
            sum: height(find('\u2211')),
            alpha: find('\u03b1').getAttribute('mathvariant'),
            gamma: find('\u0393').getAttribute('mathvariant')};
        })()"""
    )
    assert seen["font"].endswith("math")
    assert seen["bracket"] > 0.9 * seen["fraction"]
    assert seen["sum"] > 1.5 * seen["size"]
    assert (seen["alpha"], seen["gamma"]) == (None, "normal")


ARABIC = "مرحبا بالعالم"
HEBREW = "שלום עולם"


@pytest.mark.deep
def test_arabic_and_hebrew_begin_at_the_right(page):
    text = (
        f"{ARABIC}\n\n- {HEBREW}\n\n> {ARABIC}\n\nEnglish\n\n| {HEBREW} | a |\n|--|--|\n| b | c |"
    )
    say(page, f"[[say {text}\n\n```py\nx = 1\n```\n]] {ARABIC}")
    direction = page.run(
        f"""(() => {{
          const prose = {LAST}.querySelector(':scope > .prose');
          const of = (selector) => getComputedStyle(prose.querySelector(selector)).direction;
          const all = ['p', 'ul', 'blockquote', 'p:not(:first-child)', '.table', 'pre'];
          return all.map(of);
        }})()"""
    )
    assert direction == ["rtl", "rtl", "rtl", "ltr", "rtl", "ltr"]
    page.click("#input")
    page.type(ARABIC)
    direction = page.run(
        "['#input', '.conversations [aria-current] .title', '.message.user .plain']"
        ".map((each) => document.querySelector(each).getAttribute('dir'))"
    )
    assert direction == ["auto", "auto", "auto"]
    assert page.run("getComputedStyle(document.querySelector('#input')).direction") == "rtl"


def test_a_long_conversation_is_drawn_where_it_is_seen(page, server):
    choose(page, "[conversation(1, 500)]")
    page.click("#c-c1 .open")
    page.until("document.querySelectorAll('.message').length === 500")
    page.until(f"{LAST}.querySelector('.figures') !== null")
    assert count_of(page, ".message .prose p") < 200
    # A branch in it draws its own messages only.
    page.run(
        "window.added = 0; new MutationObserver((all) => all.forEach((one) => {"
        " window.added += [...one.addedNodes].filter((e) => e.matches?.('.message')).length; }))"
        ".observe(document.querySelector('#messages'), {childList: true})"
    )
    page.run(f"{LAST}.querySelector('[aria-label=Regenerate]').click()")
    shows(page, "Hello.")
    assert page.run("window.added") < 5
    # The first messages are drawn when they come near.
    page.run("document.querySelector('#scroller').scrollTop = 0")
    page.until("document.querySelector('.message.assistant strong') !== null")
    assert count_of(page, ".message.far") > 300


def test_an_import_stores_and_lists_all_conversations_at_once(browser, server):
    with before_scripts(browser, COUNTED):
        open_page(browser, server.url)
    browser.run(
        "window.draws = 0; window.transactions = 0;"
        "new MutationObserver(() => { window.draws += 1; })"
        ".observe(document.querySelector('#conversations'), {childList: true})"
    )
    choose(browser, "Array.from({length: 200}, (_, n) => conversation(n + 1000, 20))")
    browser.until("document.querySelector('#notice').innerText.includes('200 conversations')")
    browser.until("document.querySelector('#c-c1199') !== null")
    assert browser.run("window.transactions") <= 2
    assert browser.run("window.draws") <= 3
    assert sum(each["id"].startswith("c1") for each in stored(browser)) >= 200
    browser.run("new Promise((done) => { indexedDB.deleteDatabase('cpuserve'); done(); })")


# A file in which each conversation has one value of another type than it should have.
DAMAGED = """(() => {
  const paths = [['title'], ['updated'], ['system'], ['messages'], ['head'], ['id'], ['pinned'],
    ['options'], ['stamps'], ['removed'], ['messages', 1],
    ...['id', 'parent', 'role', 'state', 'text', 'images', 'files', 'thought', 'calls', 'results',
      'model', 'error', 'finish', 'figures', 'created', 'changed', 'name', 'callId', 'edited',
    ].map((name) => ['messages', 1, name]),
    ['messages', 1, 'images', 0], ['messages', 1, 'files', 0], ['messages', 1, 'calls', 0],
    ['messages', 1, 'calls', 0, 'function'], ['messages', 1, 'calls', 0, 'function', 'arguments'],
    ['messages', 1, 'files', 0, 'text'], ['messages', 1, 'figures', 'tokens']];
  const list = [];
  for (const path of paths) {
    for (const wrong of [null, 7, 'no', [], {}, [null], {a: null}, true, -1e300]) {
      const one = conversation(5000 + list.length, 2);
      const last = Object.values(one.messages)[1];
      Object.assign(last, {images: ['data:image/png;base64,'], files: [{name: 'a', text: 'b'}],
        calls: [{id: 'x', type: 'function', function: {name: 'f', arguments: '{}'}}],
        figures: {prompt: 1, cached: 0, tokens: 2, seconds: 1, first: 1}});
      const keys = path.map((key) => (key === 1 ? last.id : key));
      const at = keys.slice(0, -1).reduce((value, key) => value[key], one);
      at[keys.at(-1)] = wrong;
      list.push(one);
    }
  }
  return list;
})()"""


@pytest.mark.deep
def test_a_damaged_import_leaves_the_page_as_it_was(page, server):
    say(page, "[[say Good.]]")
    choose(page, DAMAGED)
    page.until("document.querySelector('#notice').innerText.includes('damaged')")
    open_again(page, server.url)
    page.until("document.querySelectorAll('[id^=c-c5]').length > 10")
    # What was taken in can be shown, found and exported.
    shown = page.run(
        """(async () => {
          const { asMarkdown } = await import('/webui/transfer.js');
          const { loadAll } = await import('/webui/history.js');
          for (const one of await loadAll()) asMarkdown(one);
          const ids = [...document.querySelectorAll('[id^=c-c5]')].map((row) => row.id);
          for (const id of ids) {
            document.getElementById(id).querySelector('.open').click();
            await new Promise((resolve) => setTimeout(resolve, 0));
          }
          return ids.length;
        })()"""
    )
    assert shown < 300
    page.click("#search")
    page.type("Good")
    page.until("document.querySelectorAll('.conversations li').length >= 1")
    page.run("indexedDB.deleteDatabase('cpuserve')")
    assert [text for text in page.console if "favicon" not in text] == []


BLOCKED = """(() => {
  const blocked = () => { throw new DOMException('blocked', 'SecurityError'); };
  for (const name of ['localStorage', 'sessionStorage', 'indexedDB']) {
    Object.defineProperty(window, name, {get: blocked});
  }
  window.BroadcastChannel = class { constructor() { blocked(); } };
})()"""


def test_the_page_works_where_the_browser_blocks_storage(browser, server):
    with before_scripts(browser, BLOCKED):
        browser.console.clear()
        browser.open(server.url + "/")
        browser.until(LOADED)
    say(browser, "[[say Works.]]")
    assert last_text(browser) == "Works."
    assert "does not keep" in browser.run("document.querySelector('#status').innerText")
    browser.click("#open-settings")
    browser.run("document.querySelector('.settings .check input').click()")
    browser.click("#new")
    say(browser, "[[say Again.]]")
    browser.click(".conversations .open", 1)
    browser.until(f"{LAST}?.innerText.includes('Works.')")
    assert [text for text in browser.console if "favicon" not in text] == []


@pytest.mark.deep
def test_escape_closes_the_key_dialog_until_the_user_wants_it(browser):
    with scripted_server(http={"api_key": ("secret",)}) as server:
        browser.console.clear()
        browser.open(server.url + "/#machine")
        browser.until("document.querySelector('#key-dialog').open")
        browser.run(
            "window.opened = 0; new MutationObserver((all) => { window.opened += all.length; })"
        )
        browser.press("Escape")
        browser.until("!document.querySelector('#key-dialog').open")
        browser.until("document.querySelector('#status button') !== null")
        # The machine view asks on, but not the user.
        browser.until("document.querySelector('#machine').innerText.includes('API key')")
        asked = sum(url.endswith("/v1/activity") for url in browser.urls)
        browser.until(
            "performance.getEntriesByType('resource')"
            f".filter((e) => e.name.endsWith('/v1/activity')).length > {asked + 1}"
        )
        assert not browser.run("document.querySelector('#key-dialog').open")
        browser.click("#status button")
        browser.until("document.querySelector('#key-dialog').open")
        browser.click("#key")
        browser.type("secret")
        browser.press("Enter")
        browser.until(LOADED)
        browser.until("document.querySelector('#status').hidden")
        browser.run("location.hash = '#chat'")


@pytest.mark.deep
def test_a_model_that_is_gone_does_not_stay_selected(browser):
    with scripted_server(names=("stays", "goes")) as server:
        port = server.port
        open_page(browser, server.url)
        choose_model(browser, "goes")
        say(browser, "[[say Before.]]")
        assert chats(browser, server)[-1]["model"] == "goes"
    with scripted_server(names=("stays",), port=port) as server:
        browser.run("document.dispatchEvent(new Event('visibilitychange'))")
        browser.until("document.querySelector('#model').value === 'stays'")
        assert "no model goes" in browser.run("document.querySelector('#notice').innerText")
        write(browser, "[[say After.]]")
        wait_for_response(browser, "After.")
        sent = [x.body["model"] for x in server.exchanges if x.path.endswith("chat/completions")]
        assert sent == ["stays"]
    with scripted_server(names=("another",), port=port) as server:
        # A request that fails makes the page look for the models, too.
        write(browser, "[[say Late.]]")
        browser.until("document.querySelector('.trouble .wrong') !== null")
        browser.until("document.querySelector('#model').value === 'another'")
        browser.click(".trouble button")
        wait_for_response(browser, "Late.")


@pytest.mark.deep
def test_only_the_users_own_tools_ask_the_user(page, server):
    page.click("#open-settings")
    page.click(".check input", 1)
    set_field(page, "Your tools", json.dumps([{"name": "weather"}, {"name": "news"}]))
    calls = 'calculate {"expression": "6 * 7"} ;; weather {"city": "Rome"} ;; news {}'
    write(page, f"[[calls {calls}]] [[say Done.]]")
    page.until("document.querySelectorAll('.result textarea').length === 2")
    page.click(".result textarea", 1)
    page.type("no news")
    page.click(".result .primary", 1)
    page.until("document.querySelectorAll('.result textarea').length === 1")
    # What the user has entered survives a reload.
    one = conversation_id(page)
    page.until(f"{messages_of(one)}.then(all => all.at(-1).results !== undefined)")
    open_again(page, server.url)
    page.until("document.querySelectorAll('.result textarea').length === 1")
    page.click(".result textarea")
    page.type("sunny")
    page.click(".result .primary")
    shows(page, "Done.")
    results = [m["content"] for m in chats(page, server)[-1]["messages"] if m["role"] == "tool"]
    assert results == ["42", "sunny", "no news"]


@pytest.mark.deep
def test_an_own_tool_with_the_name_of_a_built_in_one_is_the_users(page, server):
    page.click("#open-settings")
    page.click(".check input", 1)
    set_field(page, "Your tools", json.dumps([{"name": "calculate"}]))
    write(page, '[[call calculate {"expression": "6 * 7"}]] [[say Done.]]')
    page.until("document.querySelectorAll('.result textarea').length === 1")
    assert [t["function"]["name"] for t in chats(page, server)[-1]["tools"]] == ["calculate"]


def test_a_model_that_reads_text_only_is_not_offered_pictures(page, tmp_path):
    label = "document.querySelector('#attach').getAttribute('aria-label')"
    page.until(f"{label} === 'Attach PDF, Word or text files'")
    assert "image" not in page.run("document.querySelector('#attach-file').accept")
    picture, notes = tmp_path / "grey.png", tmp_path / "notes.txt"
    picture.write_bytes(png(30, 30))
    notes.write_text("Notes.", encoding="utf-8")
    page.choose_files("#attach-file", picture, notes)
    page.until("document.querySelector('#notice').innerText.includes('reads no pictures')")
    assert count_of(page, ".chip") == 1
