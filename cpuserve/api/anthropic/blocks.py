"""Turn Anthropic content blocks into text, or into a NonTextPart if they are not text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from cpuserve.api.request.content_parts import (
    ContentPart,
    NonTextPart,
    elsewhere,
    non_text_part,
    plain,
)
from cpuserve.errors import InvalidRequest

# Claude Code's first line of the system text, which is about billing and changes with each session:
# prompts that begin with it share no prefix in the cache.
_BILLING = "x-anthropic-billing-header:"
_PLAIN = 'send its text as {"type": "text", "media_type": "text/plain", "data": ...}'


def blocks(content: object, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each block with its path; a string is one block of text."""
    if isinstance(content, str):
        yield where, {"type": "text", "text": content}
        return
    if not isinstance(content, list):
        refuse(where, "must be a string or a list of content blocks")
    for index, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            refuse(f"{where}.{index}", "must be a content block with a type")
        yield f"{where}.{index}", block


def system_text(content: object, where: str = "system") -> str:
    """Return the texts of the system field, joined by newlines, without the line about billing."""
    texts = [text_of(block, path) for path, block in blocks(content, where)]
    return "\n".join(text for text in map(_without_billing, texts) if text is not None)


def _without_billing(text: str) -> str | None:
    """Return the text without a first line about billing; None if there is nothing else."""
    if not text.startswith(_BILLING):
        return text
    _, is_more, more = text.partition("\n")
    return more if is_more else None


def shown(block: dict[str, Any], where: str) -> ContentPart:
    """Return the text of a block in a user's turn, or a NonTextPart in its place.

    Raises:
      InvalidRequest: the block is not valid.
    """
    kind = block["type"]
    if kind == "text":
        return text_of(block, where)
    show = _SHOWN.get(kind)
    return non_text_part(kind, where) if show is None else show(block, where)


def returned(content: object, where: str) -> list[ContentPart]:
    """Return the content of a tool_result block as parts; no content is refused."""
    if not isinstance(content, list):
        return [] if content is None else [plain(content)]
    return [_returned(part, f"{where}.{index}") for index, part in enumerate(content)]


def _returned(block: object, where: str) -> ContentPart:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(block, dict) or not isinstance(kind, str):
        return plain(block)
    try:
        return shown(block, where)
    except InvalidRequest:
        return non_text_part(kind, where)


def of_assistant(block: dict[str, Any]) -> str:
    """Return a block of an assistant turn as text; another server may have written it."""
    kind = block["type"]
    if kind == "text":
        return plain(block.get("text"))
    if kind == "compaction" and isinstance(block.get("content"), str):
        return plain(block["content"])
    return elsewhere(kind, block)


def text_of(block: dict[str, Any], where: str) -> str:
    """Return the text of a text block; InvalidRequest if the block has another type."""
    if block["type"] != "text":
        refuse(where, f"has type {block['type'][:40]!r}; this model reads text only")
    return _string(block, "text", where)


def _document(block: dict[str, Any], where: str) -> ContentPart:
    """Return a document's title, context and text, each on a line of its own."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if not isinstance(source, dict) or kind not in ("text", "content"):
        told = f"has type {str(kind)[:40]!r}, which is not supported: {_PLAIN}"
        return NonTextPart(_document_name(block), f"{where}.source {told}")
    lines = [_optional(block, name, where) for name in ("title", "context")]
    if kind == "content":
        inner = blocks(source.get("content"), f"{where}.source.content")
        parts = [shown(part, path) for path, part in inner]
        text = "\n".join(part if isinstance(part, str) else part.line for part in parts)
    else:
        if source.get("media_type", "text/plain") != "text/plain":
            refuse(f"{where}.source.media_type", f"must be text/plain: {_PLAIN}")
        text = _string(source, "data", f"{where}.source")
    return "\n".join([*filter(None, lines), text])


def _document_name(block: dict[str, Any]) -> str:
    source, title = block.get("source"), block.get("title")
    media = source.get("media_type") if isinstance(source, dict) else None
    noun = "a PDF document" if media == "application/pdf" else "a document"
    return f"{noun} ({title[:200]})" if isinstance(title, str) and title else noun


def _search_result(block: dict[str, Any], where: str) -> str:
    """Return the title, the source and the text of a search result, each on a line of its own."""
    lines = [_string(block, name, where) for name in ("title", "source")]
    inner = blocks(block.get("content"), f"{where}.content")
    text = "\n".join(text_of(part, path) for path, part in inner)
    return "\n".join([*filter(None, lines), text])


def _tool_reference(block: dict[str, Any], where: str) -> str:
    """Return a line about a tool that a tool search found: the model sees all tools anyway."""
    return f"[The tool {_string(block, 'tool_name', where)} is among your tools.]"


# The functions that turn blocks of other types into text. Responses have no citations.
_SHOWN: dict[str, Callable[[dict[str, Any], str], ContentPart]] = {
    "document": _document,
    "search_result": _search_result,
    "tool_reference": _tool_reference,
}


def _string(block: dict[str, Any], name: str, where: str) -> str:
    text = block.get(name)
    if not isinstance(text, str):
        refuse(where, f"must have its {name} as a string")
    return text


def _optional(block: dict[str, Any], name: str, where: str) -> str | None:
    return None if block.get(name) is None else _string(block, name, where)


def refuse(where: str, why: str) -> NoReturn:
    """Raise InvalidRequest for the value at this path."""
    msg = f"{where} {why}"
    raise InvalidRequest(msg, param=where.partition(".")[0])
