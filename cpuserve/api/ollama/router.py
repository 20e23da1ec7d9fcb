"""POST /api/chat and /api/generate."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from fastapi import APIRouter, Request, Response

from cpuserve.api.ollama.common import check_text, json_response
from cpuserve.api.ollama.errors import OllamaError
from cpuserve.api.ollama.schema import (
    OllamaAnswer,
    OllamaChat,
    OllamaGenerate,
    OllamaRequest,
    chat_call,
    generate_call,
    is_zero,
)
from cpuserve.api.ollama.writer import Writer
from cpuserve.api.request.context import read_call
from cpuserve.api.response.openapi import LINES, json_body
from cpuserve.api.response.writer import respond
from cpuserve.serving.generate import prepare

if TYPE_CHECKING:
    from cpuserve.api.request.context import RequestContext
    from cpuserve.serving.call import GenerateCall

router = APIRouter()
T = TypeVar("T", bound=OllamaRequest)


@router.post(
    "/api/chat", openapi_extra=json_body(OllamaChat, OllamaAnswer, OllamaError, stream=LINES)
)
async def chat(request: Request) -> Response:
    """Generate the next message of a conversation."""
    async with read_call(request, "ollama-", OllamaChat) as (received, asked):
        return await _answer(received, asked, chat_call, chat=True)


@router.post(
    "/api/generate",
    openapi_extra=json_body(OllamaGenerate, OllamaAnswer, OllamaError, stream=LINES),
)
async def generate(request: Request) -> Response:
    """Answer a prompt."""
    async with read_call(request, "ollama-", OllamaGenerate) as (received, asked):
        return await _answer(received, asked, generate_call, chat=False)


async def _answer(
    received: RequestContext,
    asked: T,
    to_call: Callable[[T, RequestContext], GenerateCall],
    *,
    chat: bool,
) -> Response:
    if not asked.asks:
        check_text(asked, *(("/api/chat", "messages") if chat else ("/api/generate", "prompt")))
    if not asked.asks and is_zero(asked.keep_alive):
        return await _unload(received, asked.model, chat=chat)
    model = await received.choose(asked.model)
    if not asked.asks:  # clients load a model like this; the one that they name is loaded now
        told = Writer(model, chat=chat).part("", done=True, done_reason="load")
        return json_response(told)
    call = to_call(asked, received)
    generation = await prepare(received.served, call, received.body_bytes)
    return respond(generation, Writer(model, chat=chat, generation=generation))


async def _unload(received: RequestContext, name: str, *, chat: bool) -> Response:
    """Unload a model that is not used, without loading it first; the first model stays."""
    received.names(name)
    model = received.models.resolve(name)
    await received.models.unload(model)
    return json_response(Writer(model, chat=chat).part("", done=True, done_reason="unload"))
