"""Keys that an input method for Chinese, Japanese or Korean takes send, rename and stop nothing."""

import pytest

from tests.webui.visit import BUSY, IDLE, begin_long, browser, chats, page, say, server

__all__ = ["browser", "page", "server"]  # fixtures

# Chrome and Firefox tell keys of a composition so, and Safari the Enter that ends one so.
COMPOSING = ["isComposing: true", "keyCode: 229"]


def press_composing(page, key, how, where="document.activeElement"):
    page.run(
        f"{where}.dispatchEvent(new KeyboardEvent('keydown', "
        f"{{key: '{key}', {how}, bubbles: true, cancelable: true}}))"
    )


@pytest.mark.parametrize("how", COMPOSING)
def test_enter_of_a_composition_does_not_send(page, server, how):
    page.click("#input")
    page.type("\u306b\u307b\u3093\u3054")
    press_composing(page, "Enter", how)
    assert page.run("document.querySelector('#input').value") == "\u306b\u307b\u3093\u3054"
    assert chats(page, server) == []


@pytest.mark.parametrize("how", COMPOSING)
def test_enter_and_escape_of_a_composition_do_not_end_an_edit(page, server, how):
    say(page, "[[say First.]]")
    page.click(".message.user [aria-label='Edit the message']")
    for key in ("Enter", "Escape"):
        press_composing(page, key, how)
    assert page.run("document.activeElement.tagName") == "TEXTAREA"
    assert page.run("document.querySelector('.message.user textarea') !== null")
    assert len(chats(page, server)) == 1


@pytest.mark.parametrize("how", COMPOSING)
def test_escape_of_a_composition_stops_no_response(page, how):
    begin_long(page)
    press_composing(page, "Escape", how, "document.querySelector('#input')")
    assert page.run(BUSY)
    page.press("Escape")
    page.until(IDLE)
