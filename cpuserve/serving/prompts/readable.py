"""Replace or refuse the parts of a conversation that a model cannot read, for all dialects."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NoReturn, TypeGuard

from cpuserve.errors import InvalidRequest
from cpuserve.tokenizer.conversation import (
    ConversationMessage,
    Kind,
    MediaPart,
    join_texts,
    left_out,
    readable_kinds,
)


def readable(
    messages: list[ConversationMessage], reads: Collection[Kind] = ()
) -> list[ConversationMessage]:
    """Return the messages with a line of text in the place of each part that the model cannot read.

    reads: the kinds of parts, besides text, that the model reads.

    Results of tools and earlier turns stay in a conversation,
    so refusing a part in them would make the whole conversation unusable.
    A part in the user's last turn is refused, because the model could only guess its content.

    Raises:
      InvalidRequest: the user's own last turn has a part that the model cannot read.
    """
    found, own = messages, None
    for index, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, list):
            continue
        unread = next((part for part in content if _is_unread(part, reads)), None)
        if unread is None:
            continue
        if own is None:
            own = _own_turn([message.get("role") for message in messages])
        if index in own:
            _refuse(unread, reads)
        if found is messages:
            found = list(messages)
        lines = [left_out(p, reads) if _is_unread(p, reads) else p for p in content]
        found[index] = {**message, "content": join_texts(lines)}
    return found


def _is_unread(part: object, reads: Collection[Kind]) -> TypeGuard[MediaPart]:
    return isinstance(part, MediaPart) and (part.kind not in reads or bool(part.why))


def _refuse(part: MediaPart, reads: Collection[Kind]) -> NoReturn:
    usual = f"has type {part.type[:40]!r}; this model reads {readable_kinds(reads)}"
    hint = f": {part.hint}" if part.hint else ""
    msg = f"{part.where} {part.why or usual + hint}"
    raise InvalidRequest(msg, role="messages")


def _own_turn(roles: Sequence[object]) -> Sequence[int]:
    """Return the indices of the user's last turn, which the response is for.

    The turn counts as empty after a tool's result, because clients put the tool's output there.
    A last message of the assistant, which the response continues, does not count.
    """
    end = len(roles)
    if end and roles[-1] == "assistant":
        end -= 1
    start = end
    while start and roles[start - 1] not in ("assistant", "tool", "function"):
        start -= 1
    return range(start, end) if not start or roles[start - 1] == "assistant" else ()
