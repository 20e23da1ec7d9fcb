"""Put the texts of PDF and Word documents into messages, if the model does not see their pages."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, TypeGuard

from cpuserve.base.errors import InvalidRequest
from cpuserve.media.decoding.client import DECODER
from cpuserve.media.decoding.texts import DOCX, has_word_head
from cpuserve.tokenizer.conversation import (
    ConversationMessage,
    MediaPart,
    is_data_url,
    join_texts,
)

if TYPE_CHECKING:
    from cpuserve.serving.threads import TurnThreads

_PDF = "application/pdf"
_MOST_BYTES = 32 << 20
# How base64 begins for the first bytes of these files.
_PDF_BEGINS, _ZIP_BEGINS = "JVBERi", "UEsDB"


def has_text(part: object, *, sees: bool) -> TypeGuard[MediaPart]:
    """Return whether a part is a document that the model gets as text.

    sees: whether the model sees the pages of PDF documents.
    """
    if not isinstance(part, MediaPart) or part.kind != "file" or part.why or part.file_id:
        return False
    begin = part.data or (part.url.partition(",")[2] if is_data_url(part.url) else "")
    if part.media_type == DOCX or has_word_head(part.content) or begin.startswith(_ZIP_BEGINS):
        return bool(part.content or begin)
    is_pdf = part.content.startswith(b"%PDF-") or begin.startswith(_PDF_BEGINS)
    return not sees and (is_pdf or (part.media_type == _PDF and bool(part.content or begin)))


async def with_texts(
    messages: list[ConversationMessage],
    own: Collection[int],
    threads: TurnThreads,
    *,
    sees: bool,
) -> list[ConversationMessage]:
    """Return messages with the name and the text of a document in place of each such part.

    own: the indices of the user's own last turn, where a document that cannot be read is refused;
      elsewhere a line takes its place, so that the conversation can go on.
    threads: where documents are read.

    Raises InvalidRequest: a document is refused.
    """
    found = list(messages)
    for index, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, list) or not any(has_text(part, sees=sees) for part in content):
            continue
        parts: list[Any] = []
        for part in content:
            if not has_text(part, sees=sees):
                parts.append(part)
                continue
            try:
                parts.append(await _text(part, threads))
            except InvalidRequest as error:
                if index in own:
                    raise
                why = error.message.removeprefix(part.where).strip()
                noun = f"{part.noun[:1].upper()}{part.noun[1:]}"
                parts.append(f"[{noun} was left out: it {why}.]")
        found[index] = {**message, "content": join_texts(parts)}
    return found


async def _text(part: MediaPart, threads: TurnThreads) -> str:
    """Return the name and the text of a document; errors begin with the place of the part."""
    size = len(part.data) + len(part.url) + len(part.content)
    try:
        data = (await threads.run(size, lambda: part.read(_MOST_BYTES))).data
        text = await threads.run(len(data), lambda: DECODER.text(data))
    except InvalidRequest as error:
        if not error.message.startswith(part.where):
            error.message = f"{part.where} {error.message}"
        error.param = error.role = "messages"
        raise
    return f"{part.name}\n{text}" if part.name else text
