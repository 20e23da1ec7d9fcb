"""POST /v2/embed and /v1/embed."""

from __future__ import annotations

from fastapi import APIRouter, Response

from cpuserve.api.request.context import RequestContext
from cpuserve.api.route import generate, post
from cpuserve.api.vectors.cohere.errors import COHERE
from cpuserve.api.vectors.cohere.schema import (
    CohereEmbeddings,
    CohereEmbedRequest,
    CohereEmbedV1Request,
    CohereFields,
    cohere_call,
)
from cpuserve.api.vectors.cohere.writer import CohereWriter
from cpuserve.config.engine import EMBEDDINGS

router = APIRouter()
_WORDS = {
    "prompt": "texts",
    "prompt_name": "input_type",
    "cut": ', or set truncate to "END", which cuts it',
}


@post(
    router,
    "/v2/embed",
    schema=CohereEmbedRequest,
    response=CohereEmbeddings,
    dialect=COHERE,
    id_prefix="embd-",
    words=lambda _: _WORDS,
    poolings=EMBEDDINGS,
)
async def cohere_embed(received: RequestContext, asked: CohereEmbedRequest) -> Response:
    """Return a vector for each text, in the format of Cohere."""
    return await _embed(received, asked)


@post(
    router,
    "/v1/embed",
    schema=CohereEmbedV1Request,
    response=CohereEmbeddings,
    dialect=COHERE,
    id_prefix="embd-",
    words=lambda _: _WORDS,
    poolings=EMBEDDINGS,
)
async def cohere_embed_v1(received: RequestContext, asked: CohereEmbedV1Request) -> Response:
    """Return a vector for each text, in the format of version 1 of the Cohere API."""
    return await _embed(received, asked)


async def _embed(received: RequestContext, asked: CohereFields) -> Response:
    return await generate(
        received, asked, lambda asked: cohere_call(asked, received.context), CohereWriter
    )
