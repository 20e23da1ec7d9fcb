"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter, Response

from cpuserve.api.openai.chat.schema import ChatCompletion, ChatRequest, to_call, words
from cpuserve.api.openai.chat.writer import ChatWriter
from cpuserve.api.openai.checks import take_request_id
from cpuserve.api.request.context import RequestContext
from cpuserve.api.response.openapi import EVENTS
from cpuserve.api.route import generate, post

router = APIRouter()


@post(
    router,
    "/v1/chat/completions",
    schema=ChatRequest,
    response=ChatCompletion,
    id_prefix="chatcmpl-",
    stream=EVENTS,
    words=words,
)
async def create_chat_completion(received: RequestContext, asked: ChatRequest) -> Response:
    """Generate the next message of a conversation."""
    take_request_id(received, asked.request_id)
    return await generate(received, asked, to_call, ChatWriter)
