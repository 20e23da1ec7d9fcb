"""POST /api/embed and, as older clients ask, /api/embeddings."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter, Request, Response

from cpuserve.api.ollama.common import check_text, json_response, nanoseconds, to_json
from cpuserve.api.ollama.errors import OllamaError
from cpuserve.api.openai.embeddings.schema import check_dimensions
from cpuserve.api.openai.embeddings.writer import shortened
from cpuserve.api.request.context import read_call
from cpuserve.api.response.openapi import json_body
from cpuserve.api.response.writer import respond_whole
from cpuserve.errors import PromptTooLong
from cpuserve.serving.call import GenerateCall
from cpuserve.serving.events import floats_of
from cpuserve.serving.generate import prepare

if TYPE_CHECKING:
    from cpuserve.api.request.context import RequestContext
    from cpuserve.serving.events import Folded
    from cpuserve.serving.generate import Generation

router = APIRouter()


class OllamaEmbed(msgspec.Struct, kw_only=True):
    """POST /api/embed. Longer texts are cut to the context unless `truncate` is false.

    options and keep_alive are ignored: they are about the machine.
    """

    model: str
    input: str | list[str] | None = None
    truncate: bool | None = None
    dimensions: int | None = None
    options: dict[str, Any] | None = None
    prompt: Any = None
    messages: Any = None


class OllamaVectors(msgspec.Struct):
    """The body of POST /api/embed: a vector of length 1 for each text."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedOne(msgspec.Struct, kw_only=True):
    """POST /api/embeddings, which older clients send."""

    model: str
    prompt: str | None = None
    options: dict[str, Any] | None = None
    input: Any = None
    messages: Any = None


class OllamaVector(msgspec.Struct):
    """The body of POST /api/embeddings."""

    embedding: list[float]


@router.post("/api/embed", openapi_extra=json_body(OllamaEmbed, OllamaVectors, OllamaError))
async def embed(request: Request) -> Response:
    """Return a vector for each text."""
    began = time.monotonic()
    async with read_call(request, "ollama-", OllamaEmbed) as (received, asked):
        model = await received.choose(asked.model)
        check_dimensions(asked.dimensions or None, received.context)
        if not asked.input:
            check_text(asked, "/api/embed", "input")
            return json_response(
                OllamaVectors(model, [], nanoseconds(time.monotonic() - began), 0, 0)
            )
        cut = asked.truncate is not False
        generation = await _prepare(received, asked.input, cut=cut, hint="leave truncate true")

    def body(answer: Folded) -> bytes:
        vectors = [
            shortened(floats_of(choice.vector), asked.dimensions or None).tolist()
            for choice in answer.choices
        ]
        took = nanoseconds(time.monotonic() - began)
        return to_json(OllamaVectors(model, vectors, took, 0, answer.usage.prompt))

    return respond_whole(generation, body)


@router.post("/api/embeddings", openapi_extra=json_body(OllamaEmbedOne, OllamaVector, OllamaError))
async def embed_one(request: Request) -> Response:
    """Return the vector of a text."""
    async with read_call(request, "ollama-", OllamaEmbedOne) as (received, asked):
        await received.choose(asked.model)
        if not asked.prompt:
            check_text(asked, "/api/embeddings", "prompt")
            return json_response(OllamaVector([]))
        generation = await _prepare(received, asked.prompt, cut=False, hint="use /api/embed")

    def body(answer: Folded) -> bytes:
        return to_json(OllamaVector(floats_of(answer.choices[0].vector).tolist()))

    return respond_whole(generation, body)


async def _prepare(
    received: RequestContext, texts: str | list[str], *, cut: bool, hint: str
) -> Generation:
    """Return the generation of vectors; hint: how longer texts are cut, for a message."""
    call = GenerateCall(
        prompt=texts if isinstance(texts, str) else list(texts),
        truncate_prompt_tokens=-1 if cut else None,
        max_tokens=0,
        embed=True,
    )
    try:
        return await prepare(received.served, call, received.body_bytes)
    except PromptTooLong as error:
        error.message = (
            f"This model's maximum context length is {error.most} tokens, and a text is longer: "
            f"shorten it, or {hint}, which cuts it"
        )
        raise
