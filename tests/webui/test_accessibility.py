"""People who need contrast, a screen reader or a keyboard can use the chat page.

The checks are those of Lighthouse, made with the browser: contrast, names and roles, focus.
"""

import pytest

from tests.clients.scripted import scripted_server
from tests.helpers.npm import npm_folder
from tests.webui.visit import (
    BUSY,
    IDLE,
    LAST,
    LONG,
    begin_long,
    browser,
    last_text,
    open_page,
    page,
    say,
    server,
    shows,
    write,
)

__all__ = ["browser", "page", "server"]  # fixtures

# The contrast of every text and icon that is shown, with the colors and the opacity that the
# browser computes: [text, ratio] of those below 4.5 (text) or 3 (icons).
CONTRAST = """(() => {
  const channel = (v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const parse = (text) => {
    const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number);
    return [r, g, b, a];
  };
  const over = (front, back, share) => {
    return [0, 1, 2].map((i) => front[i] * share + back[i] * (1 - share));
  };
  const chain = (element) => {
    const all = [];
    for (let e = element; e; e = e.parentElement) all.unshift(e);
    return all;
  };
  const shown = (element, color) => {
    let back = [255, 255, 255], opacity = 1;
    for (const e of chain(element)) {
      const style = getComputedStyle(e), paint = parse(style.backgroundColor);
      opacity *= Number(style.opacity);
      back = over(paint, back, paint[3] * opacity);
    }
    if (!opacity) return 21;  // shown with the focus or a mouse only
    const text = parse(color);
    const front = over(text, back, text[3] * opacity);
    const [a, b] = [front, back].map(luminance);
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  };
  const bad = [];
  let count = 0;
  const check = (element, what, color, least) => {
    if (!element.getClientRects().length || element.closest(':disabled')) return;
    if (element.closest('.hidden, .skip, script, noscript, svg.chart')) return;
    count += 1;
    const ratio = shown(element, color);
    if (ratio < least) bad.push([what.slice(0, 60), ratio.toFixed(2)]);
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim()) continue;
    const style = getComputedStyle(element);
    const color = element.closest('svg') ? style.fill : style.color;
    check(element, walker.currentNode.data.trim(), color, 4.5);
  }
  for (const icon of document.querySelectorAll('svg.icon'))
    check(icon, 'icon of ' + icon.parentElement.outerHTML, getComputedStyle(icon).stroke, 3);
  for (const field of document.querySelectorAll('input[placeholder], textarea[placeholder]'))
    check(field, field.placeholder, getComputedStyle(field, '::placeholder').color, 4.5);
  return {bad, count};
})()"""

EVERYTHING = (
    "[[think Hm.]][[say Text, `code`, **bold**, [link](https://x.org)\n\n> quoted\n\n"
    '```py\nimport os  # no\nif f(1): print("x")\n```\n\n| a | b |\n|--|--|\n| 1 | 2 |\n\n- one]]'
)

# Roles of controls that a screen reader knows how to use.
ROLES = {
    *("button", "link", "textbox", "searchbox", "combobox", "checkbox", "slider", "spinbutton"),
    *("radio", "option", "DisclosureTriangle", "menuitem", "listbox", "MenuListPopup"),
}
FOCUS = """(() => {
  const e = document.activeElement, style = getComputedStyle(e), box = e.getBoundingClientRect();
  const outline = style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2;
  const down = box.bottom > 0 && box.top < innerHeight;
  return {
    name: e === document.body ? 'BODY' : e.id || e.ariaLabel || e.innerText?.trim() || e.tagName,
    ring: e.matches(':focus-visible') && outline,
    seen: box.width > 0 && down && box.right > 0 && box.left < innerWidth,
  };
})()"""
REGIONS = {"generic", "complementary", "article"}
SHIFT = 8


def controls(page):
    """Return [(role, name)] of everything in the accessibility tree that can have the focus."""
    page.call("Accessibility.enable")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    page.call("Accessibility.disable")
    found = []
    for node in nodes:
        flags = {each["name"]: each["value"].get("value") for each in node.get("properties", [])}
        role = node.get("role", {}).get("value")
        if not node["ignored"] and flags.get("focusable") and role != "RootWebArea":
            found.append((role, node.get("name", {}).get("value", "").strip()))
    return found


def check(page):
    """Everything that the page shows now has contrast, names and roles."""
    contrast = page.run(CONTRAST)
    assert contrast["bad"] == []
    assert contrast["count"] > 20
    # Regions get the focus from a script only.
    # The machine view scrolls and has no controls, so keys must reach the region itself (axe).
    found = [
        each for each in controls(page) if each[0] not in REGIONS and each != ("region", "Machine")
    ]
    assert len(found) > 10
    assert [each for each in found if not each[1]] == []
    assert {role for role, _ in found} <= ROLES


@pytest.mark.deep
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_everything_can_be_read_and_has_a_name_and_a_role(page, dark):
    page.emulate(dark=dark, size=(1280, 900))
    page.until("document.querySelector('.ideas button') !== null")
    check(page)
    say(page, EVERYTHING)
    page.run("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
    check(page)
    say(page, "[[nothing that the script knows")
    page.click(".message.user [aria-label='Edit the message']")
    page.click("#open-settings")
    check(page)
    page.run("location.hash = '#machine'")
    page.until("document.querySelectorAll('.core').length > 0")
    check(page)
    page.run("location.hash = '#chat'")
    page.emulate()


def tab_to(page, name, modifiers=0, most=80):
    """Press Tab until the control with this id or name has the focus; it is always visible."""
    for _ in range(most):
        page.press("Tab", modifiers)
        focus = page.run(FOCUS)
        if focus["name"] != "BODY":  # between the last and the first control of the page
            assert focus["ring"], focus
            assert focus["seen"], focus
        if focus["name"] == name:
            return
    pytest.fail(f"{name} is not reached with Tab")


def test_a_keyboard_is_enough_to_send_stop_edit_and_change_settings(page):
    page.press("/")
    page.type("[[say First.]]")
    page.press("Enter")
    shows(page, "First.")
    page.type(LONG)
    page.press("Enter")
    page.until(f"{BUSY} && {LAST}.innerText.includes('word20')")
    page.press("Escape")
    page.until(IDLE)
    assert "word399" not in last_text(page)
    tab_to(page, "Edit the message", SHIFT)
    page.press("Enter")
    page.until("document.activeElement.tagName === 'TEXTAREA'")
    page.run("document.activeElement.select()")
    page.type("[[say Edited.]]")
    page.press("Enter")
    shows(page, "Edited.")
    tab_to(page, "open-settings", SHIFT)
    page.press("Enter")
    page.until("document.activeElement.id === 'settings'")
    tab_to(page, "system")
    page.type("Be brief.")
    page.press("Escape")
    page.until("document.querySelector('#settings').hidden")
    assert page.run("document.activeElement.id") == "open-settings"
    page.press("Enter")
    page.until("document.activeElement.id === 'settings'")
    assert page.run("document.querySelector('#system').value") == "Be brief."
    page.press("Escape")
    tab_to(page, "tab-machine", SHIFT)
    page.press("Enter")
    page.until("location.hash === '#machine'")
    page.run("location.hash = '#chat'")


def test_a_button_keeps_the_focus_when_its_response_ends(page):
    say(page, "[[say First.]]")
    begin_long(page)
    # The response ends a little later than the page shows it as stopped.
    focused = page.run(f"""(async () => {{
      const escape = new KeyboardEvent('keydown', {{key: 'Escape', bubbles: true}});
      document.activeElement.dispatchEvent(escape);
      const button = {LAST}.querySelector("[aria-label='Regenerate']");
      const again = {LAST}.querySelector('.trouble button');
      const kept = [];
      for (const one of [button, again]) {{
        one.focus();
        await new Promise((done) => setTimeout(done, 400));
        kept.push(document.activeElement === one);
      }}
      return kept;
    }})()""")
    assert focused == [True, True]


@pytest.mark.deep
def test_everything_is_reached_with_the_keyboard(page):
    say(page, "[[say Hi.]]")
    page.run("document.querySelector('.skip').focus()")
    seen = set()
    for _ in range(200):
        page.press("Tab")
        seen.add(page.run(FOCUS)["name"])
        if "send" in seen:
            break
    assert {"new", "search", "model", "open-settings", "input", "send", "attach"} <= seen
    assert {"Copy the message", "Regenerate", "Edit the message"} <= seen
    page.run("document.activeElement.blur()")
    page.press("/")
    assert page.run("document.activeElement.id") == "input"


AXE = "axe.run().then(({violations}) => violations.map((v) => [v.id, v.nodes.map((n) => n.html)]))"
DETAILS = "[[say # T\n\n<details><summary>S</summary>x</details>\n\nH<sub>2</sub> <kbd>C</kbd>]] "


@pytest.mark.deep
@pytest.mark.network
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_nothing(page, dark, tmp_path):
    script = npm_folder("axe-core@4.10.3") / "node_modules/axe-core/axe.min.js"
    page.run(script.read_text(encoding="utf-8") + "; 0")
    notes = tmp_path / "notes.txt"
    notes.write_text("Notes.", encoding="utf-8")
    page.emulate(dark=dark, size=(1280, 900))
    steps = {
        "welcome": lambda: page.until("document.querySelector('.ideas button') !== null"),
        "files": lambda: page.choose_files("#attach-file", notes),
        "text": lambda: say(page, DETAILS + "word " * 300),
        "edit": lambda: page.click(".message.user [aria-label='Edit the message']"),
        "unsent": lambda: page.press("Escape"),
        "settings": lambda: page.click("#open-settings"),
        "phone": lambda: page.emulate(dark=dark, size=(390, 800)),
        "menu": lambda: page.click("#menu"),
        "machine": lambda: page.run("location.hash = '#machine'"),
        "dead": lambda: page.run("window.fetch = () => Promise.reject(new Error('no'))"),
        "stale": lambda: page.until("document.querySelector('.stale') !== null"),
    }
    found = {}
    for name, step in steps.items():
        step()
        if bad := page.run(AXE):
            found[name] = bad
    page.run("location.hash = '#chat'")
    page.emulate(size=(1280, 800))
    assert found == {}


@pytest.mark.deep
@pytest.mark.network
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_nothing_where_a_message_does_not_fit(browser, dark):
    script = npm_folder("axe-core@4.10.3") / "node_modules/axe-core/axe.min.js"
    with scripted_server(max_model_len=512) as small:
        open_page(browser, small.url)
        browser.run(script.read_text(encoding="utf-8") + "; 0")
        for number in range(4):
            say(browser, f"[[say Reply {number}.]] " + "word " * 80)
        write(browser, "[[say Late.]] " + "word " * 120)
        browser.until("document.querySelector('#fit-dialog').open")
        for size in ((1280, 900), (390, 800)):
            browser.emulate(dark=dark, size=size)
            assert browser.run(AXE) == []
            assert browser.run(CONTRAST)["bad"] == []
        browser.press("Escape")
    browser.emulate(size=(1280, 800))


def test_the_menu_of_a_phone_is_closed_by_a_touch_beside_it(page):
    page.emulate(size=(390, 800))
    page.click("#menu")
    page.until("document.querySelector('#new').getClientRects().length > 0")
    page.click("#veil")
    page.until("document.querySelector('#new').getClientRects().length === 0")
    page.emulate(size=(1280, 800))


def test_a_dead_server_has_no_figures_of_now(page):
    page.run("location.hash = '#machine'")
    page.until("document.querySelectorAll('.core').length > 0")
    page.run("window.fetch = () => Promise.reject(new Error('no'))")
    page.until("document.querySelector('#machine .wrong').innerText.includes('the figures of')")
    page.run("location.hash = '#chat'")
