"""Convert messages of chat completions to the messages that chat templates read."""

from __future__ import annotations

from typing import Any

from cpuserve.api.openai.parts import openai_part
from cpuserve.api.request.content_parts import plain
from cpuserve.base.errors import InvalidRequest
from cpuserve.tokenizer.conversation import Content, ContentPart, ConversationMessage, MediaPart

_TEXTS = ("text", "input_text", "output_text", "refusal")
# Clients return the model's earlier thoughts in one of these fields; the first with a text is used.
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_CHANGED = frozenset((*_THOUGHTS, "tool_calls"))


def chat_messages(messages: list[dict[str, Any]]) -> list[ConversationMessage]:
    """Return the messages with typed content parts, and with thoughts in reasoning_content.

    Invalid parts and other fields stay as they are; the code that renders the template checks them.
    """
    return [
        message if _is_plain(message) else _message(message, f"messages[{index}]")
        for index, message in enumerate(messages)
    ]


def continues(messages: list[dict[str, Any]], continues_last: bool | None) -> bool | None:
    """Return `continues_last` (continue_final_message), or True if the last message has `prefix`.

    In the APIs of DeepSeek and Mistral, `prefix` marks the message that the model continues.

    Raises:
      InvalidRequest: `prefix` is not a boolean, is true elsewhere, or contradicts `continues_last`.
    """
    for index, message in enumerate(messages):
        prefix = message.get("prefix")
        if prefix is None or prefix is False:
            continue
        where = f"messages[{index}].prefix"
        if prefix is not True:
            msg = f"{where} must be true or false, got {str(prefix)[:80]!r}"
            raise InvalidRequest(msg, param="messages")
        if index != len(messages) - 1 or message.get("role") != "assistant":
            msg = f"{where} is true, but only a last message of the assistant can be continued"
            raise InvalidRequest(msg, param="messages")
        if continues_last is False:
            msg = f"{where} is true, but continue_final_message is false: omit one of them"
            raise InvalidRequest(msg, param="messages")
        return True
    return continues_last


def _is_plain(message: dict[str, Any]) -> bool:
    """Return whether a message needs no conversion, as most do; there may be 100,000 messages."""
    return isinstance(message.get("content"), str) and _CHANGED.isdisjoint(message)


def _message(message: dict[str, Any], where: str) -> ConversationMessage:
    role, content = message.get("role"), message.get("content")
    if role == "assistant":
        return _of_assistant(message, where)
    if role in ("tool", "function"):
        return {**message, "content": _lenient(content, where)}
    if isinstance(content, list):
        return {**message, "content": [_part(p, where, i) for i, p in enumerate(content)]}
    return message


def _of_assistant(message: dict[str, Any], where: str) -> ConversationMessage:
    found = {name: value for name, value in message.items() if name not in _THOUGHTS}
    thoughts = [message[name] for name in _THOUGHTS if isinstance(message.get(name), str)]
    content = message.get("content")
    if isinstance(content, list):
        inner = [part for part in content if _is_thought(part)]
        content = [part for part in content if not _is_thought(part)]
        thoughts.append("\n".join(_thought(part) for part in inner))
    found["content"] = None if content is None else _lenient(content, where)
    if (thought := next(filter(None, thoughts), None)) is not None:
        found["reasoning_content"] = thought
    if isinstance(calls := message.get("tool_calls"), list):
        found["tool_calls"] = [_call(call) for call in calls]
    return found


def _is_thought(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") in ("thinking", "redacted_thinking")


def _thought(part: dict[str, Any]) -> str:
    """Return the text of a thinking part; Mistral clients send it as a list of text parts."""
    told = part.get("thinking")
    if isinstance(told, list):
        return "".join(plain(inner.get("text")) for inner in told if isinstance(inner, dict))
    return told if isinstance(told, str) else ""


def _call(call: Any) -> Any:
    """Return a tool call as a function call; a custom tool's input becomes the argument `input`."""
    custom = call.get("custom") if isinstance(call, dict) else None
    if not isinstance(custom, dict):
        return call
    function = {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
    return {"id": call.get("id"), "type": "function", "function": function}


def _part(part: Any, where: str, index: int) -> Any:
    """Return a part of a message as a ContentPart, or unchanged if it is invalid."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        return part
    if kind not in _TEXTS:
        return openai_part(part, f"{where}.content[{index}]")
    text = _text(part)
    return text if isinstance(text, str) else part


def _text(part: dict[str, Any]) -> Any:
    return part.get("refusal" if part.get("type") == "refusal" else "text")


def _lenient(content: Any, where: str) -> Content:
    """Return the content of an assistant or tool message; parts of any type are accepted."""
    if not isinstance(content, list):
        return plain(content)
    return [_any_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]


def _any_part(part: Any, where: str) -> ContentPart:
    if not isinstance(part, dict):
        return part if isinstance(part, MediaPart) else plain(part)
    text = _text(part)
    if isinstance(text, str):
        return text
    kind = part.get("type")
    return openai_part(part, where) if isinstance(kind, str) and kind not in _TEXTS else plain(text)
