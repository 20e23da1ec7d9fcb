"""Open the signatures of thinking blocks that came back without their text.

Clients that request `display` "omitted" get the text of thoughts only in the signature.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cpuserve.api.anthropic.conversation import THOUGHTS
from cpuserve.api.request.sealed import is_sealed
from cpuserve.api.request.sealed_texts import opened
from cpuserve.serving.threads import run_sized

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cpuserve.api.request.context import RequestContext


async def with_opened(
    received: RequestContext, messages: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the messages with the texts of thoughts that this server sealed.

    For errors, see `opened`.
    """
    found = await run_sized(received.body_bytes, lambda: _sealed(messages))
    texts = await opened(received, found, "messages")
    return [_read(message, texts) for message in messages] if texts else messages


def _sealed(messages: list[dict[str, Any]]) -> list[str]:
    """Return the signatures that have the text of a thought."""
    parts = (block for message in messages for block in _content(message))
    return [block["signature"] for block in parts if _is_sealed(block)]


def _content(message: dict[str, Any]) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _is_sealed(block: object) -> bool:
    """Return whether a block is a thought with its text in the signature only."""
    if not isinstance(block, dict) or block.get("type") not in THOUGHTS:
        return False
    return not block.get("thinking") and is_sealed(block.get("signature"))


def _read(message: dict[str, Any], texts: Mapping[str, str]) -> dict[str, Any]:
    if not any(map(_is_sealed, _content(message))):
        return message
    content = [
        {**block, "thinking": texts.get(block["signature"])} if _is_sealed(block) else block
        for block in message["content"]
    ]
    return {**message, "content": content}
