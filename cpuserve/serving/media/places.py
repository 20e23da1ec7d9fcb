"""Media go where the user has written the marker of the model, as in vLLM.

Clients of dots.ocr, LLaVA and others send `<image>` or the like in the text of a turn, and the
items of the turn apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cpuserve.media.kinds import KINDS
from cpuserve.tokenizer.conversation import ContentPart, ConversationMessage, MediaPart

if TYPE_CHECKING:
    from cpuserve.serving.media.reader import MediaReader


def placed(
    messages: Sequence[ConversationMessage], reader: MediaReader
) -> list[ConversationMessage]:
    """Return messages with the items of each turn in place of the marks in its texts.

    A turn stays as it is unless its texts have a mark as often as the turn has items.
    A document may have several pages, so a turn with one stays as it is.
    """
    placed_messages = list(messages)
    for kind, marks in reader.marks.items():
        part_kind = KINDS[kind].parts[0]  # a part of this kind has one item
        parts = {part for part, read_as in reader.part_kinds.items() if read_as == kind}
        placed_messages = [
            _placed(message, marks, reader, parts, part_kind) for message in placed_messages
        ]
    return placed_messages


def _placed(
    message: ConversationMessage,
    marks: Sequence[str],
    reader: MediaReader,
    kinds: set[str],
    part_kind: str,
) -> ConversationMessage:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    items = [part for part in content if reader.reads(part) and part.kind in kinds]
    if not items or any(part.kind != part_kind for part in items):
        return message
    texts = [part for part in content if isinstance(part, str)]
    for mark in marks:
        if sum(text.count(mark) for text in texts) == len(items):
            return {**message, "content": _parts(content, items, mark)}
    return message


def _parts(
    content: Sequence[ContentPart], items: Sequence[MediaPart], mark: str
) -> list[ContentPart]:
    """Return the parts with the items in place of each `mark`, and no empty texts."""
    remaining_items, parts = iter(items), list[ContentPart]()
    for part in content:
        if not isinstance(part, str):
            parts += [] if any(part is item for item in items) else [part]
            continue
        first_text, *texts = part.split(mark)
        parts.append(first_text)
        for text in texts:
            parts += [next(remaining_items), text]
    return [part for part in parts if part]
