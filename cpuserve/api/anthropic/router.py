"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response

from cpuserve.api.anthropic.errors import MessageError
from cpuserve.api.anthropic.schema import (
    CountRequest,
    Message,
    MessagesRequest,
    TokenCount,
    to_call,
)
from cpuserve.api.anthropic.writer import MessageWriter
from cpuserve.api.request.context import read_call
from cpuserve.api.response.openapi import EVENTS, json_body
from cpuserve.api.response.writer import respond
from cpuserve.serving.generate import count_prompt, prepare

router = APIRouter()


@router.post(
    "/v1/messages", openapi_extra=json_body(MessagesRequest, Message, MessageError, stream=EVENTS)
)
async def create_message(request: Request) -> Response:
    """Generate the next message of a conversation."""
    async with read_call(request, "msg_", MessagesRequest) as (received, asked):
        model = await received.choose(asked.model)
        generation = await prepare(received.served, to_call(asked), received.body_bytes)
        writer = MessageWriter(received, generation, model)
    return respond(generation, writer)


@router.post(
    "/v1/messages/count_tokens", openapi_extra=json_body(CountRequest, TokenCount, MessageError)
)
async def count_tokens(request: Request) -> Response:
    """Return how many tokens the prompt of such a message has."""
    async with read_call(request, "msg_", CountRequest) as (received, asked):
        await received.choose(asked.model)
        count = await count_prompt(received.context, to_call(asked), received.body_bytes)
    body = msgspec.json.encode(TokenCount(count))
    return Response(body, media_type="application/json")
