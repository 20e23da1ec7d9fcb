"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from cpuserve.api.openai.chat.schema import ChatCompletion, ChatRequest, to_call
from cpuserve.api.openai.chat.writer import ChatWriter
from cpuserve.api.request.context import read_call
from cpuserve.api.response.openapi import EVENTS, json_body
from cpuserve.api.response.writer import respond
from cpuserve.serving.generate import prepare

router = APIRouter()


@router.post(
    "/v1/chat/completions", openapi_extra=json_body(ChatRequest, ChatCompletion, stream=EVENTS)
)
async def create_chat_completion(request: Request) -> Response:
    """Generate the next message of a conversation."""
    async with read_call(request, "chatcmpl-", ChatRequest) as (received, asked):
        model = await received.choose(asked.model)
        generation = await prepare(received.served, to_call(asked), received.body_bytes)
        writer = ChatWriter(received, asked, generation, model)
    return respond(generation, writer)
