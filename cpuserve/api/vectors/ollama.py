"""POST /api/embed, and POST /api/embeddings, which older clients use."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter, Response

from cpuserve.api.ollama.common import check_text, keep_alive_s, nanoseconds, to_json
from cpuserve.api.ollama.errors import OLLAMA
from cpuserve.api.request.context import RequestContext
from cpuserve.api.response.in_parts import in_parts
from cpuserve.api.response.writer import json_response
from cpuserve.api.route import generate, post
from cpuserve.errors import PromptTooLong
from cpuserve.serving.calls.call import GenerateCall
from cpuserve.serving.calls.events import floats_of
from cpuserve.serving.vectors.matryoshka import check_dimensions, shortened

if TYPE_CHECKING:
    from cpuserve.serving.calls.events import WholeResponse
    from cpuserve.serving.generation.generate import Generation

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
async def embed(received: RequestContext, asked: OllamaEmbed) -> Response:
    """Return a vector for each text."""
    seconds = keep_alive_s(asked.keep_alive)
    if not asked.input:
        model = await received.choose(asked.model)
        received.keep_loaded(seconds)
        check_dimensions(asked.dimensions or None, received.context)
        check_text(asked, "/api/embed", "input")
        took = nanoseconds(time.monotonic() - received.begun)
        return json_response(OllamaVectors(model, [], took, 0, 0))

    def call(asked: OllamaEmbed) -> GenerateCall:
        received.keep_loaded(seconds)
        check_dimensions(asked.dimensions or None, received.context)
        return _call(asked.input or "", cut=asked.truncate is not False)

    with _told_how_to_cut("leave truncate true"):
        return await generate(received, asked, call, EmbedWriter)


@post(
    router,
    "/api/embeddings",
    schema=OllamaEmbedOne,
    response=OllamaVector,
    dialect=OLLAMA,
    id_prefix="ollama-",
)
async def embed_one(received: RequestContext, asked: OllamaEmbedOne) -> Response:
    """Return the vector of a text."""
    seconds = keep_alive_s(asked.keep_alive)
    if not asked.prompt:
        await received.choose(asked.model)
        received.keep_loaded(seconds)
        check_text(asked, "/api/embeddings", "prompt")
        return json_response(OllamaVector([]))

    def call(asked: OllamaEmbedOne) -> GenerateCall:
        received.keep_loaded(seconds)
        return _call(asked.prompt or "", cut=False)

    with _told_how_to_cut("use /api/embed"):
        return await generate(received, asked, call, EmbedOneWriter)


class EmbedWriter:
    """Writes the response to a request to /api/embed."""

    def __init__(
        self, received: RequestContext, asked: OllamaEmbed, _generation: Generation
    ) -> None:
        self._received = received
        self._dimensions = asked.dimensions or None

    def whole(self, response: WholeResponse) -> bytes:
        """Return the whole response as JSON."""
        vectors = in_parts(
            shortened(floats_of(choice.vector), self._dimensions).tolist()
            for choice in response.choices
        )
        model, took = self._received.served.name, time.monotonic() - self._received.begun
        return to_json(OllamaVectors(model, vectors, nanoseconds(took), 0, response.usage.prompt))


class EmbedOneWriter:
    """Writes the response to a request to /api/embeddings."""

    def __init__(
        self, _received: RequestContext, _asked: OllamaEmbedOne, _generation: Generation
    ) -> None:
        pass

    def whole(self, response: WholeResponse) -> bytes:
        """Return the whole response as JSON."""
        return to_json(OllamaVector(floats_of(response.choices[0].vector).tolist()))


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
