"""POST /api/embed, and POST /api/embeddings, which older clients use."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from fastapi import APIRouter, Response

from cpuserve.api.ollama.common import check_text, keep_alive_s, nanoseconds
from cpuserve.api.ollama.errors import OLLAMA
from cpuserve.api.request.context import RequestContext
from cpuserve.api.response.in_parts import in_parts
from cpuserve.api.response.writer import json_response
from cpuserve.api.route import post
from cpuserve.api.vectors.route import Made, answer
from cpuserve.base.errors import PromptTooLong
from cpuserve.serving.calls.call import GenerateCall
from cpuserve.serving.calls.events import WholeResponse
from cpuserve.serving.vectors.matryoshka import check_dimensions, shortened

router = APIRouter()


class OllamaEmbed(msgspec.Struct, kw_only=True):
    """The body of POST /api/embed. Texts that are too long are cut, unless `truncate` is false.

    `options` are ignored, because they concern only the machine.

    keep_alive: how long the model stays loaded after the request, in seconds or as a duration.
    """

    model: str
    input: str | list[str] | None = None
    truncate: bool | None = None
    dimensions: int | None = None
    options: dict[str, Any] | None = None
    keep_alive: Any = None
    prompt: Any = None
    messages: Any = None


class OllamaVectors(msgspec.Struct):
    """The response of POST /api/embed: an embedding vector of unit length for each text."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedOne(msgspec.Struct, kw_only=True):
    """The body of POST /api/embeddings, which older clients send."""

    model: str
    prompt: str | None = None
    options: dict[str, Any] | None = None
    keep_alive: Any = None
    input: Any = None
    messages: Any = None


class OllamaVector(msgspec.Struct):
    """The response of POST /api/embeddings."""

    embedding: list[float]


@post(
    router,
    "/api/embed",
    schema=OllamaEmbed,
    response=OllamaVectors,
    dialect=OLLAMA,
    id_prefix="ollama-",
    words=lambda _: {"prompt": "input"},
)
async def embed(request: RequestContext, body: OllamaEmbed) -> Response:
    """Return a vector for each text."""
    seconds = keep_alive_s(body.keep_alive)
    if not body.input:
        model = await request.choose(body.model)
        request.keep_loaded(seconds)
        check_dimensions(body.dimensions or None, request.context)
        check_text(body, "/api/embed", "input")
        took = nanoseconds(time.monotonic() - request.begun)
        return json_response(OllamaVectors(model, [], took, 0, 0))

    def make(body: OllamaEmbed, request: RequestContext) -> Made:
        request.keep_loaded(seconds)
        dimensions = body.dimensions or None
        check_dimensions(dimensions, request.context)

        def value(response: WholeResponse) -> OllamaVectors:
            vectors = in_parts(
                shortened(choice.values, dimensions).tolist() for choice in response.choices
            )
            model, took = request.served.name, time.monotonic() - request.begun
            return OllamaVectors(model, vectors, nanoseconds(took), 0, response.usage.prompt)

        return _call(body.input or "", cut=body.truncate is not False), value

    with _told_how_to_cut("leave truncate true"):
        return await answer(request, body, make)


@post(
    router,
    "/api/embeddings",
    schema=OllamaEmbedOne,
    response=OllamaVector,
    dialect=OLLAMA,
    id_prefix="ollama-",
)
async def embed_one(request: RequestContext, body: OllamaEmbedOne) -> Response:
    """Return the vector of a text."""
    seconds = keep_alive_s(body.keep_alive)
    if not body.prompt:
        await request.choose(body.model)
        request.keep_loaded(seconds)
        check_text(body, "/api/embeddings", "prompt")
        return json_response(OllamaVector([]))

    def make(body: OllamaEmbedOne, request: RequestContext) -> Made:
        request.keep_loaded(seconds)
        call = _call(body.prompt or "", cut=False)
        return call, lambda response: OllamaVector(response.choices[0].values.tolist())

    with _told_how_to_cut("use /api/embed"):
        return await answer(request, body, make)


def _call(texts: str | list[str], *, cut: bool) -> GenerateCall:
    return GenerateCall(
        prompt=texts if isinstance(texts, str) else list(texts),
        truncate_prompt_tokens=-1 if cut else None,
        max_tokens=0,
        embed=True,
    )


@contextmanager
def _told_how_to_cut(hint: str) -> Iterator[None]:
    """Add `hint`, how to make the server cut texts, to the error for a text that is too long."""
    try:
        yield
    except PromptTooLong as error:
        error.message = (
            f"This model's maximum context length is {error.most} tokens, and a text is longer: "
            f"shorten it, or {hint}, which cuts it"
        )
        raise
