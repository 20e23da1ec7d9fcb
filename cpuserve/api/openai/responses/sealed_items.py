"""Open the sealed thoughts and summaries in the input items of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cpuserve.api.openai.responses.foreign_items import COMPACTED
from cpuserve.api.request.sealed import is_sealed
from cpuserve.api.request.sealed_texts import opened
from cpuserve.serving.threads import run_sized

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cpuserve.api.request.context import RequestContext

_SEALED = "encrypted_content"


async def with_opened(
    request: RequestContext, items: str | list[dict[str, Any]] | None
) -> str | list[dict[str, Any]] | None:
    """Return the items with the texts that this server sealed in them; for errors, see `opened`."""
    if not isinstance(items, list):
        return items
    found = await run_sized(len(items), lambda: [i[_SEALED] for i in items if _has_sealed(i)])
    texts = await opened(request, found, "input")
    return [_read(item, texts) if _has_sealed(item) else item for item in items] if texts else items


def _has_sealed(item: dict[str, Any]) -> bool:
    kind = item.get("type")
    known = kind == "reasoning" or (isinstance(kind, str) and kind in COMPACTED)
    return known and is_sealed(item.get(_SEALED))


def _read(item: dict[str, Any], texts: Mapping[str, str]) -> dict[str, Any]:
    text = texts.get(item[_SEALED])
    if text is None:
        return item
    if item["type"] == "reasoning":
        return {**item, "content": [{"type": "reasoning_text", "text": text}]}
    return {**item, "summary": text}
