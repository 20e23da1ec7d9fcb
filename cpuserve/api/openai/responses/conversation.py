"""Turn the input items of a response into the messages that chat templates read."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from cpuserve.api.openai.responses.tools import flat_name
from cpuserve.errors import InvalidRequest
from cpuserve.serving.call import Message, unsupported

_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text")
_REFERENCE = (
    "is an item_reference, which is not supported, because this server stores no responses: send "
    "the item itself"
)


def chat_messages(items: str | list[dict[str, Any]], instructions: str | None) -> list[Message]:
    """Return the messages; InvalidRequest names what is invalid by its path.

    The items of one turn of the assistant become one message: templates write the calls of a
    message behind its text, and the results of calls behind these.
    """
    found = _Conversation()
    if instructions:
        found.messages.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        found.messages.append({"role": "user", "content": items})
        return found.messages
    if not items:
        msg = "input is an empty list: send at least one item"
        raise InvalidRequest(msg, param="input")
    for index, item in enumerate(items):
        found.add(item, f"input[{index}]")
    found.end_turn()
    found.check_answered()
    return found.messages


class _Conversation:
    """The messages of the items so far, and the calls among them, each of which needs an output."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._texts: list[str] = []  # which the last message consists of
        self._known: set[str] = set()
        self._open: dict[str, str] = {}  # the paths of calls without an output, by their call_ids

    def add(self, item: dict[str, Any], where: str) -> None:
        """Add the next item."""
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "message":
            self._add_message(item, where)
        elif kind == "function_call":
            self._add_call(item, where)
        elif kind == "function_call_output":
            self._add_output(item, where)
        elif kind == "item_reference" or (kind is None and set(item) == {"id"}):
            msg = f"{where} {_REFERENCE}"
            raise unsupported(msg, "input")
        elif kind != "reasoning":  # the model's own earlier thoughts are not a part of its prompt
            msg = (
                f"{where} has type {str(kind)[:40]!r}, which is not supported: send messages, "
                "function_call and function_call_output"
            )
            raise unsupported(msg, "input")

    def _add_message(self, item: dict[str, Any], where: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            _refuse(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
        text = _text(item.get("content"), f"{where}.content")
        last = self.messages[-1] if self.messages else {}
        if role == "assistant" and "tool_calls" in last:
            # Text behind a call is of the same turn, whose results follow.
            self._texts.append(text)
        else:
            self._append({"role": role, "content": text})

    def _append(self, message: Message) -> None:
        self.end_turn()
        self.messages.append(message)
        self._texts = [message["content"]]

    def end_turn(self) -> None:
        """Join the texts of the last message, once, however many they are."""
        if self.messages and len(self._texts) > 1:
            self.messages[-1]["content"] = "\n".join(filter(None, self._texts))

    def _add_call(self, item: dict[str, Any], where: str) -> None:
        number, name, given = (item.get(key) for key in ("call_id", "name", "arguments"))
        if not (isinstance(number, str) and isinstance(name, str) and isinstance(given, str)):
            _refuse(where, "must have a call_id, a name and arguments, which are strings")
        namespace = item.get("namespace")
        name = flat_name(namespace if isinstance(namespace, str) else None, name)
        function = {"name": name, "arguments": _arguments(given, where)}
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self._append({"role": "assistant", "content": ""})
        calls = self.messages[-1].setdefault("tool_calls", [])
        calls.append({"id": number, "type": "function", "function": function})
        self._known.add(number)
        self._open[number] = where

    def _add_output(self, item: dict[str, Any], where: str) -> None:
        number = item.get("call_id")
        if not isinstance(number, str):
            _refuse(where, "must have the call_id of a function_call")
        if number not in self._known:
            why = f"has the call_id {number[:64]!r}, which no earlier function_call has"
            _refuse(where, f"{why}: send the item with that call before it")
        self._open.pop(number, None)
        output = _text(item.get("output"), f"{where}.output")
        self._append({"role": "tool", "tool_call_id": number, "content": output})

    def check_answered(self) -> None:
        """Raise InvalidRequest if a call has no output."""
        for number, where in self._open.items():
            why = f"is the function_call {number[:64]!r}, which needs a function_call_output"
            _refuse(where, f"{why} behind it: send its output there")


def _text(content: object, where: str) -> str:
    """Return a string, or the texts of a list of parts, joined by newlines."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        _refuse(where, "must be a string or a list of parts")
    return "\n".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: object, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        _refuse(where, 'must be a part with a type, such as {"type": "input_text", "text": ""}')
    if kind not in (*_TEXTS, "refusal"):
        _refuse(where, f"has type {kind[:40]!r}; this model reads text only")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        _refuse(where, "must have its text as a string")
    return text


def _arguments(written: str, where: str) -> dict[str, Any]:
    try:
        arguments = json.loads(written or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        _refuse(f"{where}.arguments", "must be a JSON object, written as a string")
    return arguments


def _refuse(where: str, why: str) -> NoReturn:
    msg = f"{where} {why}"
    raise InvalidRequest(msg, param="input")
