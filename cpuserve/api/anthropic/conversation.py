"""Turn Anthropic's messages into those that chat templates read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from cpuserve.errors import InvalidRequest
from cpuserve.serving.call import Message

# The model's own earlier thoughts are not a part of the conversation.
_THOUGHTS = ("thinking", "redacted_thinking")


def chat_messages(
    messages: list[dict[str, Any]], system: str | list[dict[str, Any]] | None
) -> list[Message]:
    """Return the messages; InvalidRequest names what is invalid by its path.

    A result of a tool becomes a message of the role "tool", and text beside it one of the user.
    """
    if not messages:
        msg = "messages must be a non-empty list"
        raise InvalidRequest(msg, param="messages")
    found: list[Message] = []
    uses = _Uses()
    if system:
        found.append({"role": "system", "content": _text(system, "system")})
    for index, message in enumerate(messages):
        where = f"messages.{index}"
        role = message.get("role")
        if role == "system":
            # Agents give instructions also in the middle of a conversation, between turns.
            content = _text(message.get("content"), f"{where}.content")
            found.append({"role": "system", "content": content})
            continue
        if role not in ("user", "assistant"):
            _refuse(f"{where}.role", "must be user, assistant or system")
        blocks = list(_blocks(message.get("content"), f"{where}.content"))
        found += _of_user(blocks) if role == "user" else [_of_assistant(blocks)]
        uses.follow(role, blocks)
    uses.check_answered()
    return found


class _Uses:
    """Follows the tool_use blocks of a conversation, each of which needs a tool_result.

    A template writes calls and results in order, so a call without its result would be lost, or
    have the text behind it as its result. Messages of one role in a row are one turn.
    """

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._open: dict[str, str] = {}  # the paths of those without a result, by their ids
        self._answering = False

    def follow(self, role: str, blocks: list[tuple[str, dict[str, Any]]]) -> None:
        """Read the checked blocks of the next message."""
        if role == "assistant" and self._answering:
            self.check_answered()
        self._answering = role == "user"
        for where, block in blocks:
            if block["type"] == "tool_use":
                self._known.add(block["id"])
                self._open[block["id"]] = where
            elif block["type"] == "tool_result":
                number = block["tool_use_id"]
                if number not in self._known:
                    why = (
                        f"has the tool_use_id {number[:64]!r}, which no earlier tool_use block has"
                    )
                    _refuse(where, f"{why}: send the message with that block before it")
                self._open.pop(number, None)

    def check_answered(self) -> None:
        """Raise InvalidRequest if a tool_use block has no tool_result in the user's turn."""
        for number, where in self._open.items():
            why = f"is the `tool_use` block {number[:64]!r}, which needs a `tool_result` block"
            _refuse(where, f"{why} in the next message: send its result there")


def _blocks(content: object, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each block with its path; a string is one block of text."""
    if isinstance(content, str):
        yield where, {"type": "text", "text": content}
        return
    if not isinstance(content, list):
        _refuse(where, "must be a string or a list of content blocks")
    for index, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            _refuse(f"{where}.{index}", "must be a content block with a type")
        yield f"{where}.{index}", block


def _text(content: object, where: str) -> str:
    """Return the texts of a list of text blocks, joined by newlines."""
    return "\n".join(_text_of(block, path) for path, block in _blocks(content, where))


def _text_of(block: dict[str, Any], where: str) -> str:
    if block["type"] != "text":
        _refuse(where, f"has type {block['type'][:40]!r}; this model reads text only")
    return _string(block, "text", where)


def _shown(block: dict[str, Any], where: str) -> str:
    """Return the text of a block that a user or a tool may send."""
    kind = block["type"]
    return _SHOWN[kind](block, where) if kind in _SHOWN else _text_of(block, where)


def _document(block: dict[str, Any], where: str) -> str:
    """Return a document's title, context and text, each of which begins a line."""
    source = block.get("source")
    if not isinstance(source, dict) or source.get("type") != "text":
        kind = source.get("type") if isinstance(source, dict) else None
        _refuse(f"{where}.source", f"has type {str(kind)[:40]!r}, which is not supported: {_PLAIN}")
    if source.get("media_type", "text/plain") != "text/plain":
        _refuse(f"{where}.source.media_type", f"must be text/plain: {_PLAIN}")
    lines = [_optional(block, name, where) for name in ("title", "context")]
    return "\n".join([*filter(None, lines), _string(source, "data", f"{where}.source")])


def _search_result(block: dict[str, Any], where: str) -> str:
    """Return the title, the source and the text of a search result, each of which begins a line."""
    lines = [_string(block, name, where) for name in ("title", "source")]
    return "\n".join([*filter(None, lines), _text(block.get("content"), f"{where}.content")])


_PLAIN = 'send its text as {"type": "text", "media_type": "text/plain", "data": ...}'
# Other blocks than text that become text. There are no citations in answers.
_SHOWN = {"document": _document, "search_result": _search_result}


def _string(block: dict[str, Any], name: str, where: str) -> str:
    text = block.get(name)
    if not isinstance(text, str):
        _refuse(where, f"must have its {name} as a string")
    return text


def _optional(block: dict[str, Any], name: str, where: str) -> str | None:
    return None if block.get(name) is None else _string(block, name, where)


def _of_user(blocks: list[tuple[str, dict[str, Any]]]) -> list[Message]:
    found: list[Message] = []
    texts: list[str] = []

    def close() -> None:
        if texts or not found:
            found.append({"role": "user", "content": "\n".join(texts)})
            texts.clear()

    for where, block in blocks:
        if block["type"] != "tool_result":
            texts.append(_shown(block, where))
            continue
        number = block.get("tool_use_id")
        if not isinstance(number, str):
            _refuse(where, "must have the tool_use_id of a call")
        if texts:
            close()
        content = block.get("content")
        parts = () if content is None else _blocks(content, f"{where}.content")
        result = "\n".join(_shown(part, path) for path, part in parts)
        found.append({"role": "tool", "tool_call_id": number, "content": result})
    if texts or not found:
        close()
    return found


def _of_assistant(blocks: list[tuple[str, dict[str, Any]]]) -> Message:
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for where, block in blocks:
        if block["type"] == "tool_use":
            number, name, given = (block.get(key) for key in ("id", "name", "input"))
            if not (isinstance(number, str) and isinstance(name, str) and isinstance(given, dict)):
                _refuse(where, "must have an id, a name and an input, which is an object")
            function = {"name": name, "arguments": given}
            calls.append({"id": number, "type": "function", "function": function})
        elif block["type"] not in _THOUGHTS:
            texts.append(_text_of(block, where))
    message: Message = {"role": "assistant", "content": "\n".join(texts)}
    return {**message, "tool_calls": calls} if calls else message


def _refuse(where: str, why: str) -> NoReturn:
    msg = f"{where} {why}"
    raise InvalidRequest(msg, param="messages")
