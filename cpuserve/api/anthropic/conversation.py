"""Turn Anthropic messages into the messages that chat templates read."""

from __future__ import annotations

from typing import Any

from cpuserve.api.anthropic.blocks import (
    blocks,
    of_assistant,
    refuse,
    returned,
    shown_parts,
    system_text,
    text_of,
)
from cpuserve.api.request.content_parts import joined
from cpuserve.errors import InvalidRequest
from cpuserve.tokenizer.conversation import ContentPart, ConversationMessage

THOUGHTS = ("thinking", "redacted_thinking")
_FAILED = "[The tool reports an error.]"


def chat_messages(
    messages: list[dict[str, Any]], system: str | list[dict[str, Any]] | None, note: str = ""
) -> list[ConversationMessage]:
    """Return the messages for the template; InvalidRequest has the path of an invalid part.

    A tool_result block becomes a message with the role "tool", and text in the same message becomes
    a user message. note: a text for the model, which is appended to the system text.
    """
    if not messages:
        msg = "messages must be a non-empty list"
        raise InvalidRequest(msg, param="messages")
    found: list[ConversationMessage] = []
    uses = _Uses()
    told = [text for text in (system_text(system or []), note) if text]
    if told:
        found.append({"role": "system", "content": told})
    for index, message in enumerate(messages):
        where = f"messages.{index}"
        role = message.get("role")
        if role not in ("user", "assistant", "system"):
            refuse(f"{where}.role", "must be user, assistant or system")
        content = message.get("content")
        if content is None and role == "assistant":
            content = []  # clients of other APIs send null for a turn without text
        inner = list(blocks(content, f"{where}.content"))
        if role == "system":
            # Agents send instructions as system messages between the turns of a conversation.
            texts = [text_of(block, path) for path, block in inner]
            found.append({"role": "system", "content": texts})
            continue
        found += _of_user(inner) if role == "user" else [_of_assistant(inner)]
        uses.follow(role, inner)
    uses.check_answered()
    return joined(found)


class _Uses:
    """Checks that each tool_use block of a conversation has a tool_result block.

    Templates write calls and results in order. Without this check a call could lose its result, or
    the model would read the next text as the result. Consecutive messages of a role are one turn.
    """

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._open: dict[str, str] = {}  # paths of tool_use blocks without a result, by id
        self._answering = False

    def follow(self, role: str, blocks: list[tuple[str, dict[str, Any]]]) -> None:
        """Note the calls and results in the blocks of the next message; the blocks are valid."""
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
                    refuse(where, f"{why}: send the message with that block before it")
                self._open.pop(number, None)

    def check_answered(self) -> None:
        """Raise InvalidRequest if a tool_use block has no tool_result in the next user message."""
        for number, where in self._open.items():
            why = f"is the `tool_use` block {number[:64]!r}, which needs a `tool_result` block"
            refuse(where, f"{why} in the next message: send its result there")


def _of_user(inner: list[tuple[str, dict[str, Any]]]) -> list[ConversationMessage]:
    found: list[ConversationMessage] = []
    parts: list[ContentPart] = []

    def close() -> None:
        if parts or not found:
            found.append({"role": "user", "content": list(parts)})
            parts.clear()

    for where, block in inner:
        if block["type"] != "tool_result":
            parts += shown_parts(block, where)
            continue
        number = block.get("tool_use_id")
        if not isinstance(number, str):
            refuse(where, "must have the tool_use_id of a call")
        if parts:
            close()
        content = returned(block.get("content"), f"{where}.content")
        if block.get("is_error"):
            content.insert(0, _FAILED)
        found.append({"role": "tool", "tool_call_id": number, "content": content})
    if parts or not found:
        close()
    return found


def _of_assistant(inner: list[tuple[str, dict[str, Any]]]) -> ConversationMessage:
    texts: list[ContentPart] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for where, block in inner:
        if block["type"] == "tool_use":
            number, name = block.get("id"), block.get("name")
            if not (isinstance(number, str) and isinstance(name, str)):
                refuse(where, "must have an id and a name")
            function = {"name": name, "arguments": block.get("input")}
            calls.append({"id": number, "type": "function", "function": function})
        elif block["type"] not in THOUGHTS:
            texts.append(of_assistant(block))
        elif isinstance(thought := block.get("thinking"), str):
            thoughts.append(thought)
    message: ConversationMessage = {"role": "assistant", "content": texts}
    if thought := "\n".join(filter(None, thoughts)):
        message["reasoning_content"] = thought
    return {**message, "tool_calls": calls} if calls else message
