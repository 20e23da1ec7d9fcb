"""Checks chat messages of clients and converts them to the structure that chat templates read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from cpuserve.base.errors import InvalidRequest
from cpuserve.tokenizer.conversation import Content, ContentPart, ConversationMessage, MediaPart
from cpuserve.tokenizer.finite_json import loads_finite

_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
MAX_MESSAGES = 100_000


def template_messages(
    messages: Any, *, keeps_developer: bool, text_arguments: bool = False
) -> list[ConversationMessage]:
    """Return checked copies of the messages; InvalidRequest with the path of an invalid field.

    The content of each message is a text or a list of content parts.

    keeps_developer: whether the template supports the role "developer";
      if not, it becomes "system".
    text_arguments: whether the template writes arguments that are a text unchanged.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        msg = "messages must be a non-empty list"
        raise InvalidRequest(msg, role="messages")
    if len(messages) > MAX_MESSAGES:
        msg = f"messages has {len(messages)} entries; at most {MAX_MESSAGES} are accepted"
        raise InvalidRequest(msg, role="messages")
    found = [_message(m, f"messages[{i}]", keeps_developer) for i, m in enumerate(messages)]
    _settle_arguments(found, text_arguments)
    return found


def _settle_arguments(messages: list[ConversationMessage], text_arguments: bool) -> None:
    """Replace arguments that are not an object by {}, or keep a text if the template writes it.

    An earlier call that was cut off must not make its whole conversation unusable.
    """
    for message in messages:
        for call in message.get("tool_calls") or ():
            function = call["function"]
            written = function["arguments"]
            if not isinstance(written, Mapping):
                keeps = isinstance(written, str) and text_arguments
                function["arguments"] = written if keeps else {}


def _message(message: Any, where: str, keeps_developer: bool) -> ConversationMessage:
    if not isinstance(message, Mapping):
        _refuse(where, "must be an object with role and content")
    role = message.get("role")
    # Templates write the role into the prompt, where markup in it would become special tokens.
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        _refuse(f"{where}.role", "must be a word such as system, user, assistant or tool")
    if role == "developer" and not keeps_developer:
        role = "system"
    known = {k: v for k, v in message.items() if v is not None}
    calls = _tool_calls(known.get("tool_calls"), where)
    checked = {**known, "role": role, "content": message_content(message, where, bool(calls))}
    if calls is not None:
        checked["tool_calls"] = calls
    return checked


def message_content(message: Mapping[str, Any], where: str, may_be_absent: bool = False) -> Content:
    """Return the content of a message: a text or a list of parts.

    Raises InvalidRequest with the field `where` for any other content.
    """
    content = message.get("content")
    if content is None and (may_be_absent or message.get("role") == "assistant"):
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        _refuse(f"{where}.content", "must be a string or a list of content parts")
    return [_part(p, f"{where}.content[{i}]") for i, p in enumerate(content)]


def _part(part: Any, where: str) -> ContentPart:
    if isinstance(part, str | MediaPart):
        return part
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        _refuse(
            where, 'must be a string or a part with a type, such as {"type": "text", "text": ""}'
        )
    kind = part["type"]
    if kind not in ("text", "input_text", "output_text", "refusal"):
        _refuse(where, f"has type {kind[:40]!r}; this model reads text only")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        _refuse(where, "must have its text as a string")
    return text


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]] | None:
    """Return tool calls with dicts as arguments: clients send JSON text, but templates need dicts.

    Arguments that are not a JSON object stay a text.
    """
    if calls is None:
        return None
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        _refuse(f"{where}.tool_calls", "must be a list")
    return [_tool_call(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        _refuse(where, "must have a function with a name")
    arguments = _arguments(function.get("arguments"))
    return {**call, "function": {**function, "arguments": arguments}}


def _arguments(given: Any) -> Mapping[str, Any] | str:
    """Return the arguments as a dict, or as a text if they are not a JSON object.

    Numbers that JSON cannot hold are None, because templates would write NaN or Infinity.
    """
    if isinstance(given, Mapping):
        return given
    if given is None or given == "":
        return {}
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    try:
        found = loads_finite(text)
        if isinstance(found, dict):
            # Half of a surrogate pair is no text, and values nested too deeply cannot be written.
            json.dumps(found, ensure_ascii=False).encode()
            return found
    except (ValueError, RecursionError):
        pass
    return text


def _refuse(where: str, why: str) -> NoReturn:
    msg = f"{where} {why}"
    raise InvalidRequest(msg, role="messages")
