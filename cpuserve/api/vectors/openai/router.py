"""POST /v1/embeddings."""

from __future__ import annotations

from fastapi import APIRouter, Response

from cpuserve.api.request.context import RequestContext
from cpuserve.api.route import generate, post
from cpuserve.api.vectors.openai.schema import EmbeddingAnswer, EmbeddingRequest, to_call
from cpuserve.api.vectors.openai.writer import EmbeddingWriter
from cpuserve.config.engine import EMBEDDINGS

router = APIRouter()


@post(
    router,
    "/v1/embeddings",
    schema=EmbeddingRequest,
    response=EmbeddingAnswer,
    id_prefix="embd-",
    words=lambda _: {"prompt": "input"},
    poolings=EMBEDDINGS,
)
async def create_embeddings(received: RequestContext, asked: EmbeddingRequest) -> Response:
    """Return an embedding vector for each input."""
    return await generate(
        received, asked, lambda asked: to_call(asked, received.context), EmbeddingWriter
    )
