"""Recent prompts: bounded, only of the same caller, and compared token by token."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuserve.serving.models import recent_prompts
from cpuserve.serving.models.recent_prompts import (
    PromptShape,
    RecentPrompt,
    RecentPrompts,
    bytes_of,
    common_tokens,
    compare,
    difference,
    ids_of,
)
from tests.helpers.media_items import picture_item

SCOPE = ("", 1.0, "")


def decode(ids):
    return "".join(map(chr, ids))


def prompt(text, response="", *, caller="me", scope=SCOPE, number="", media=(), **shape):
    digests = PromptShape(**{name: value.encode() for name, value in shape.items()})
    ids = bytes_of([ord(c) for c in text + response])
    made = RecentPrompt(caller, scope, text, ids, digests, num_prompt=len(text), response_id=number)
    made.media = media
    return made


def picture(name, begin=40, count=8):
    return picture_item(name.encode() * 32, [(begin, count)], [(4, 8)])


def added(*prompts):
    recent = RecentPrompts()
    for each in prompts:
        recent.add(each)
    return recent


def compared(recent, new):
    compare(new, recent.of(new.caller, new.scope), decode)


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=40))
def test_common_tokens_are_counted_exactly(one, other):
    pairs = zip(one, other, strict=False)
    wanted = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
    assert common_tokens(bytes_of(one), bytes_of(other)) == wanted
    assert ids_of(bytes_of(one)) == one


def test_the_longest_beginning_of_a_text_is_found():
    recent = added(prompt("ab"), prompt("abcd"), prompt("abx"), prompt("abcdefg"))
    assert recent.beginning("me", SCOPE, "abcdef").text == "abcd"
    assert recent.beginning("me", SCOPE, "abcd").text == "ab", "it must go on after that"
    assert recent.beginning("me", SCOPE, "xyz") is None


@pytest.mark.parametrize(
    ("caller", "scope"), [("you", SCOPE), ("me", ("lora", 1.0, "")), ("me", ("", 0.5, ""))]
)
def test_nobody_finds_the_prompt_of_another_caller_or_scope(caller, scope):
    recent = added(prompt("a" * 100, number="r1"))
    assert recent.beginning(caller, scope, "a" * 200) is None
    other = prompt("a" * 50 + "b" * 50, caller=caller, scope=scope)
    compared(recent, other)
    assert (other.difference, other.repeated) == (None, 0)
    assert recent.named("you", "r1") is None
    assert recent.named("me", "r1") is not None


def test_prompts_of_one_caller_do_not_push_out_those_of_others(monkeypatch):
    monkeypatch.setattr(recent_prompts, "MAX_PROMPTS_OF_CALLER", 4)
    recent = added(prompt("hers", caller="she"), *(prompt(f"mine {i}") for i in range(9)))
    assert len(recent) == 5
    assert recent.beginning("she", SCOPE, "hers and more") is not None
    assert recent.beginning("me", SCOPE, "mine 4.") is None
    assert recent.beginning("me", SCOPE, "mine 5.") is not None


@pytest.mark.parametrize(("limit", "most"), [("MAX_PROMPTS", 20), ("MAX_BYTES", 20_000)])
def test_many_or_large_prompts_of_one_caller_do_not_push_out_those_of_others(
    monkeypatch, limit, most
):
    monkeypatch.setattr(recent_prompts, limit, most)
    recent = RecentPrompts()
    recent.add(prompt("mine" * 100, caller="modest"))
    for number in range(60):
        text = f"{number:02}" * (10 if limit == "MAX_PROMPTS" else 300)
        recent.add(prompt(text, caller="greedy"))
        if limit == "MAX_PROMPTS":
            recent.add(prompt(text, caller=f"other {number % 2}"))
    assert len(recent.of("modest", SCOPE)) == 1
    assert len(recent.of("greedy", SCOPE)) >= 5


def test_a_text_that_is_encoded_later_leaves_the_count_of_bytes_right():
    recent, text = RecentPrompts(), "\u4e00\xe9" * 500
    for _ in range(recent_prompts.MAX_PROMPTS_OF_CALLER + 1):
        made = prompt("".join(text))
        recent.add(made)
        msgspec.json.encode(made.text)
    for key in [*recent._prompts]:
        recent._forget(key)
    assert recent._num_bytes == 0


def test_the_oldest_prompts_are_forgotten_beyond_the_limits(monkeypatch):
    monkeypatch.setattr(recent_prompts, "MAX_PROMPTS", 3)
    recent = added(*(prompt(f"p{i}", caller=str(i)) for i in range(5)))
    assert len(recent) == 3
    monkeypatch.setattr(recent_prompts, "MAX_BYTES", 1000)
    recent.add(prompt("x" * 180, caller="9"))
    assert len(recent) == 1
    recent.add(prompt("x" * 9999, caller="9"))
    assert [each.text for each in recent.of("9", SCOPE)] == ["x" * 180], "it pushes out no others"


def test_a_prompt_is_compared_with_the_most_similar_one():
    end = "a text that both have, so it is one conversation" * 8
    recent = added(
        prompt("b" * 300), prompt("a" * 200 + "old" * 40 + end), prompt("a" * 40 + "c" * 99)
    )
    new = prompt("a" * 200 + "new" * 40 + end)
    compared(recent, new)
    found = new.difference
    assert (found.reason, found.token, found.missed, found.total) == (
        "messages_changed",
        200,
        120 + len(end),
        320 + len(end),
    )
    assert (found.before, found.now) == (None, "newnewnewnewnewn")
    assert new.miss(None) == {
        "reason": "messages_changed",
        "token": 200,
        "of": 320 + len(end),
        "now": "newnewnewnewnewn",
    }


def test_a_conversation_is_recognized_although_its_beginning_has_changed():
    turns = "the first question of a conversation, which is long enough to be found again" * 5
    recent = added(prompt("10:01 " + turns), prompt("another conversation " * 40))
    new = prompt("10:02 " + turns + "the next question" * 9)
    compared(recent, new)
    found = new.difference
    assert (found.token, found.now[:5]) == (4, "2 the")


SESSION = "session_6f9619ff-8b86-d011-b42d-00c04fc964ff"
SHARED = "support-assistant-of-all-users"


@pytest.mark.parametrize(
    ("caller", "old", "new", "shown"),
    [
        ("10.0.0.1", "", "", False),
        ("fe80::1", "", "", False),
        ("", "", "", False),
        ("10.0.0.1", SESSION, SESSION + "8", False),
        ("10.0.0.1", SHARED, SHARED, False),
        ("10.0.0.1", SESSION, SESSION, True),
        ("key-1", "", "", True),
    ],
    ids=["IPv4", "IPv6", "socket", "other session", "shared session", "session", "key"],
)
def test_clients_of_one_address_do_not_see_the_texts_of_each_other(caller, old, new, shown):
    end = "instructions that all clients have" * 20
    secret, guess = (
        prompt("a" * 400 + word * 99 + end, caller=caller) for word in ("secret", "guess")
    )
    secret.session, guess.session = old, new
    recent = added(secret)
    compared(recent, new := guess)
    found = new.miss(None)
    assert ("before" in found) is shown
    assert (found["token"], found["now"][:5]) == (400, "guess")


def test_unrelated_prompts_are_no_miss():
    recent = added(prompt("a" * 20 + "b" * 400))
    new = prompt("a" * 20 + "c" * 400)
    compared(recent, new)
    assert new.miss(0) is None


def test_the_next_turn_is_a_miss_only_if_its_tokens_are_gone():
    recent = added(prompt("a" * 300, "said"))
    new = prompt("a" * 300 + "said" + "c" * 50)
    compared(recent, new)
    assert new.difference is None
    assert new.miss(288) is None
    assert new.miss(100) == {"reason": "not_cached", "token": 100, "of": 300}
    assert new.miss(None) is None, "it is not known yet"


def test_another_way_to_begin_the_response_is_no_difference():
    assert difference(prompt("a" * 90 + "<assistant>"), prompt("a" * 90 + "<A>hi"), decode) is None


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ({}, {"scope": ("lora", 1.0, "")}, "model_changed"),
        ({"tools": "a"}, {"tools": "b"}, "tools_changed"),
        ({"tools": "a", "system": "c"}, {"tools": "b", "system": "d"}, "tools_changed"),
        ({"system": "a"}, {"system": "b"}, "system_changed"),
        ({"settings": "a"}, {"settings": "b"}, "settings_changed"),
        ({}, {}, "messages_changed"),
    ],
)
def test_the_reason_is_the_first_part_that_differs(old, new, reason):
    found = difference(prompt("a" * 200, **old), prompt("b" * 200, **new), decode)
    assert (found.reason, found.token) == (reason, 0)


def test_a_prompt_without_messages_says_so():
    one, other = prompt("a" * 99), prompt("b" * 99)
    other.shape = PromptShape(chat=False)
    assert difference(one, other, decode).reason == "prompt_changed"


def test_equal_prompts_of_another_model_differ():
    found = difference(prompt("a" * 99), prompt("a" * 99, scope=("lora", 1.0, "")), decode)
    assert (found.reason, found.token) == ("model_changed", 99)


def test_the_beginning_of_a_text_with_another_picture_is_not_found():
    """Pictures have no text: without their digests, a response about another one would be found."""
    recent = added(prompt("a" * 60, media=[picture("x")]))
    text = "a" * 80
    assert recent.beginning("me", SCOPE, text, [b"y" * 32]) is None
    assert recent.beginning("me", SCOPE, text) is None
    assert recent.beginning("me", SCOPE, text, [b"x" * 32]) is not None
    assert recent.beginning("me", SCOPE, text, [b"x" * 32, b"y" * 32]) is not None


def test_prompts_with_two_pictures_and_one_text_differ_from_the_picture_on():
    recent = added(prompt("a" * 100, media=[picture("x")]))
    same = prompt("a" * 100, media=[picture("x")])
    compared(recent, same)
    assert (same.difference, same.repeated) == (None, 100)
    other = prompt("a" * 100, media=[picture("y")])
    compared(recent, other)
    assert other.difference.token == 40
    assert other.repeated == 0


def test_the_memory_of_pictures_counts():
    spans = [(2 * i, 1) for i in range(1000)]
    large = picture_item(bytes(32), spans, [])
    assert prompt("a", media=[large]).num_bytes > prompt("a").num_bytes + 100_000
