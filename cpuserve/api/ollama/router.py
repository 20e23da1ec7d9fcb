"""POST /api/chat and /api/generate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from fastapi import APIRouter, Response

from cpuserve.api import route
from cpuserve.api.ollama.common import check_text, keep_alive_s
from cpuserve.api.ollama.errors import OLLAMA
from cpuserve.api.ollama.schema import (
    OllamaAnswer,
    OllamaChat,
    OllamaGenerate,
    OllamaRequest,
    chat_call,
    generate_call,
    words,
)
from cpuserve.api.ollama.writer import OllamaWriter, part_of
from cpuserve.api.request.context import RequestContext
from cpuserve.api.response.openapi import LINES
from cpuserve.api.response.writer import json_response
from cpuserve.api.route import post

if TYPE_CHECKING:
    from cpuserve.serving.calls.call import GenerateCall

router = APIRouter()
T = TypeVar("T", bound=OllamaRequest)


@post(
    router,
    "/api/chat",
    schema=OllamaChat,
    response=OllamaAnswer,
    dialect=OLLAMA,
    id_prefix="ollama-",
    stream=LINES,
    words=words,
)
async def chat(request: RequestContext, body: OllamaChat) -> Response:
    """Generate the next message of a conversation."""
    if not body.asks:
        check_text(body, "/api/chat", "messages")
    return await _respond(request, body, chat_call, chat=True)


@post(
    router,
    "/api/generate",
    schema=OllamaGenerate,
    response=OllamaAnswer,
    dialect=OLLAMA,
    id_prefix="ollama-",
    stream=LINES,
    words=words,
)
async def generate(request: RequestContext, body: OllamaGenerate) -> Response:
    """Generate the response to a prompt."""
    if not body.asks:
        check_text(body, "/api/generate", "prompt")
    return await _respond(request, body, partial(generate_call, request), chat=False)


async def _respond(
    request: RequestContext, body: T, to_call: Callable[[T], GenerateCall], *, chat: bool
) -> Response:
    """Return the response; without text, load the model, or unload it if keep_alive is 0."""
    seconds = keep_alive_s(body.keep_alive)
    if body.asks:

        def call(body: T) -> GenerateCall:
            request.keep_loaded(seconds)
            return to_call(body)

        return await route.generate(request, body, call, partial(OllamaWriter, chat=chat))
    if seconds == 0:
        # Unload the model if it is loaded, without loading it first.
        request.note_model(body.model)
        name, reason = request.models.resolve(body.model), "unload"
        await request.models.unload(name)
    else:
        name, reason = await request.choose(body.model), "load"
        request.keep_loaded(seconds)
    return json_response(part_of(name, "", chat=chat, done=True, done_reason=reason))
