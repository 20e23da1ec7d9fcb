"""Pictures go where the user has written the marker of the model, as in vLLM.

Clients of dots.ocr, LLaVA and others send `<image>` or the like in the text of a turn, and the
pictures of the turn apart.
"""

from __future__ import annotations

from collections.abc import Sequence

from cpuserve.serving.pictures import is_read
from cpuserve.tokenizer.conversation import ContentPart, ConversationMessage, MediaPart


def placed(
    messages: Sequence[ConversationMessage], marks: Sequence[str]
) -> list[ConversationMessage]:
    """Return messages with the pictures of each turn in place of the marks in its texts.

    A turn stays as it is unless its texts have a mark as often as the turn has pictures.
    A document may have several pages, so a turn with one stays as it is.

    marks: the texts that may stand for a picture; an earlier one has priority.
    """
    return [_placed(message, marks) for message in messages]


def _placed(message: ConversationMessage, marks: Sequence[str]) -> ConversationMessage:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    pictures = [part for part in content if isinstance(part, MediaPart) and is_read(part)]
    if not pictures or any(part.kind != "image" for part in pictures):
        return message
    texts = [part for part in content if isinstance(part, str)]
    for mark in marks:
        if sum(text.count(mark) for text in texts) == len(pictures):
            return {**message, "content": _parts(content, pictures, mark)}
    return message


def _parts(
    content: Sequence[ContentPart], pictures: Sequence[MediaPart], mark: str
) -> list[ContentPart]:
    """Return the parts with the pictures in place of each `mark`, and no empty texts."""
    rest, parts = iter(pictures), list[ContentPart]()
    for part in content:
        if not isinstance(part, str):
            parts += [] if is_read(part) else [part]
            continue
        first, *others = part.split(mark)
        parts.append(first)
        for text in others:
            parts += [next(rest), text]
    return [part for part in parts if part]
