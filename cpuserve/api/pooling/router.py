"""POST /pooling and /classify."""

from __future__ import annotations

from fastapi import APIRouter, Response

from cpuserve.api.dialect import Dialect
from cpuserve.api.pooling.schema import (
    ClassifyAnswer,
    ClassifyRequest,
    PoolingAnswer,
    PoolingRequest,
    classify_call,
    pooling_call,
)
from cpuserve.api.pooling.writer import ClassifyWriter, PoolingWriter
from cpuserve.api.request.context import RequestContext
from cpuserve.api.route import generate, post

router = APIRouter()


@post(
    router,
    "/pooling",
    schema=PoolingRequest,
    response=PoolingAnswer,
    id_prefix="pool-",
    words=lambda _: {"prompt": "input"},
)
async def pooling(received: RequestContext, asked: PoolingRequest) -> Response:
    """Return the vector or the labels of each input, or of each of its tokens."""
    return await generate(
        received, asked, lambda asked: pooling_call(asked, received.context), PoolingWriter
    )


@post(
    router,
    "/classify",
    schema=ClassifyRequest,
    response=ClassifyAnswer,
    id_prefix="classify-",
    words=lambda _: {"prompt": "input"},
)
async def classify(received: RequestContext, asked: ClassifyRequest) -> Response:
    """Return the most likely label of each input, and the probability of each label."""
    return await generate(received, asked, classify_call, ClassifyWriter)


# The API of vLLM for results that are neither texts nor embeddings.
POOLING = Dialect((router,))
