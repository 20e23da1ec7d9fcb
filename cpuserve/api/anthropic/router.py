"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from fastapi import APIRouter, Response

from cpuserve.api.anthropic.errors import ANTHROPIC
from cpuserve.api.anthropic.schema import (
    CountRequest,
    Message,
    MessagesRequest,
    TokenCount,
    to_call,
    words,
)
from cpuserve.api.anthropic.signatures import with_opened
from cpuserve.api.anthropic.writer import MessageWriter
from cpuserve.api.request.context import RequestContext
from cpuserve.api.response.openapi import EVENTS
from cpuserve.api.response.writer import json_response
from cpuserve.api.route import generate, post, prompt_length

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
async def create_message(received: RequestContext, asked: MessagesRequest) -> Response:
    """Generate the next message of a conversation."""
    await received.choose(asked.model)
    asked.messages = await with_opened(received, asked.messages)
    return await generate(received, asked, to_call, MessageWriter)


@post(
    router,
    "/v1/messages/count_tokens",
    schema=CountRequest,
    response=TokenCount,
    dialect=ANTHROPIC,
    id_prefix="msg_",
    words=words,
)
async def count_tokens(received: RequestContext, asked: CountRequest) -> Response:
    """Return the number of prompt tokens that the messages, system texts and tools make."""
    await received.choose(asked.model)
    asked.messages = await with_opened(received, asked.messages)
    return json_response(TokenCount(await prompt_length(received, asked, to_call)))
