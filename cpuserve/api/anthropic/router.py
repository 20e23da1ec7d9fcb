"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Response

from cpuserve.api.anthropic.conversation import THOUGHTS
from cpuserve.api.anthropic.errors import ANTHROPIC
from cpuserve.api.anthropic.schema import (
    CountRequest,
    Message,
    MessagesRequest,
    TokenCount,
    to_call,
    words,
)
from cpuserve.api.anthropic.writer import MessageWriter
from cpuserve.api.request.context import RequestContext
from cpuserve.api.request.sealed import is_sealed
from cpuserve.api.request.sealed_texts import opened
from cpuserve.api.response.openapi import EVENTS
from cpuserve.api.response.writer import json_response
from cpuserve.api.route import generate, post, prompt_length
from cpuserve.serving.threads import run_sized

router = APIRouter()


@post(
    router,
    "/v1/messages",
    schema=MessagesRequest,
    response=Message,
    dialect=ANTHROPIC,
    id_prefix="msg_",
    stream=EVENTS,
    words=words,
)
async def create_message(request: RequestContext, body: MessagesRequest) -> Response:
    """Generate the next message of a conversation."""
    await request.choose(body.model)
    body.messages = await _with_opened(request, body.messages)
    return await generate(request, body, to_call, MessageWriter)


@post(
    router,
    "/v1/messages/count_tokens",
    schema=CountRequest,
    response=TokenCount,
    dialect=ANTHROPIC,
    id_prefix="msg_",
    words=words,
)
async def count_tokens(request: RequestContext, body: CountRequest) -> Response:
    """Return the number of prompt tokens that the messages, system texts and tools make."""
    await request.choose(body.model)
    body.messages = await _with_opened(request, body.messages)
    return json_response(TokenCount(await prompt_length(request, body, to_call)))


async def _with_opened(
    request: RequestContext, messages: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the messages with the texts of thoughts that this server sealed.

    Clients that request `display` "omitted" get the text of a thought only in its signature.
    For errors, see `opened`.
    """
    found = await run_sized(request.body_bytes, lambda: _sealed(messages))
    texts = await opened(request, found, "messages")
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
