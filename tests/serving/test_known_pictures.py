"""The tokens of an earlier turn are used again only for the pictures that it was about."""

import asyncio
from types import SimpleNamespace

import pytest

from cpuserve.serving.calls.call import GenerateCall
from cpuserve.serving.models.recent_prompts import RecentPrompt, RecentPrompts, bytes_of, scope_of
from cpuserve.serving.prompts import known_tokens
from tests.helpers.media_items import picture_item

MARKER, PLACEHOLDER = 7, 9


def picture(name):
    return picture_item(name.encode() * 32, [(1, 4)], [(2, 8)])


@pytest.fixture
def context(monkeypatch):
    """A context whose tokenizer returns the numbers of characters; "?" is a marker."""

    async def encode(_context, texts, **_):
        return [[MARKER if c == "?" else ord(c) for c in text] for text in texts]

    def continued(_context, earlier, _text):
        ids = known_tokens.ids_of(earlier.ids)
        return known_tokens._KnownTokens(ids, len(earlier.text), earlier.media)

    monkeypatch.setattr(known_tokens, "encode", encode)
    monkeypatch.setattr(known_tokens, "_continued", continued)
    made = SimpleNamespace(recent=RecentPrompts(), kept=None)
    made.default_sampling, made.max_model_len = {}, 100
    return made


def tokens(context, text, *names):
    call = GenerateCall(caller="me")
    digests = [picture(name).digest for name in names]
    return asyncio.run(known_tokens.chat_tokens(context, call, text, "", None, None, digests))


def test_a_turn_about_the_same_picture_begins_with_the_tokens_of_the_turn_before(context):
    call, ids = GenerateCall(caller="me"), [65, *[PLACEHOLDER] * 4, 66]
    pictures = [picture("x")]
    recent = RecentPrompt("me", scope_of(call), "A?B", bytes_of(ids), None, media=pictures)
    context.recent.add(recent)
    assert tokens(context, "A?BC?", "x", "y") == ([*ids, 67, MARKER], pictures)
    assert tokens(context, "A?BC", "y") == ([65, MARKER, 66, 67], ()), "it is another picture"
    assert tokens(context, "A?BC") == ([65, MARKER, 66, 67], ()), "it is a text"
