"""Rewrites the ids of calls in a conversation to the ids that a template accepts.

A conversation may have ids of another server. Templates of Mistral refuse ids that are not nine
letters and digits. Other templates write the id in place of the function's name, so an id
of another server would hide the function. Some templates write an id of their own in the call,
and the client's id only in the result. A new id depends only on the messages before its call,
so that the prompt of a conversation stays the same when the conversation grows.
"""

from __future__ import annotations

import hashlib
import re
import string
from typing import Literal

from cpuserve.tokenizer.conversation import ConversationMessage

# The ids of calls that a template accepts: any, nine letters and digits, or functions.NAME:NUMBER.
CallIds = Literal["any", "nine", "named"]

_NINE = re.compile(r"[A-Za-z0-9]{9}")
_DIGITS = string.ascii_letters + string.digits


def with_ids(messages: list[ConversationMessage], kind: CallIds) -> list[ConversationMessage]:
    """Return the messages with ids of this kind, in calls and in the results of the calls."""
    if kind == "any":
        return messages
    found: list[ConversationMessage] = []
    known: dict[str, str] = {}
    number = 0
    for message in messages:
        calls = message.get("tool_calls")
        result = message.get("tool_call_id")
        if calls:
            written = []
            for call in calls:
                given = str(call.get("id") or f"call {number}")
                named = f"functions.{call['function']['name']}:{number}"
                known[given] = _nine(given) if kind == "nine" else named
                written.append({**call, "id": known[given]})
                number += 1
            message = {**message, "tool_calls": written}
        elif isinstance(result, str):
            other = _nine(result) if kind == "nine" else result
            message = {**message, "tool_call_id": known.get(result, other)}
        found.append(message)
    return found


def _nine(given: str) -> str:
    if _NINE.fullmatch(given):
        return given
    value = int.from_bytes(hashlib.sha256(given.encode("utf-8", "replace")).digest()[:8], "big")
    found = []
    for _ in range(9):
        value, digit = divmod(value, len(_DIGITS))
        found.append(_DIGITS[digit])
    return "".join(found)
