"""POST /pooling and /classify."""

from __future__ import annotations

from fastapi import APIRouter, Response

from cpuserve.api.request.context import RequestContext
from cpuserve.api.route import generate, post
from cpuserve.api.vectors.pooling.schema import (
    ClassifyAnswer,
    ClassifyRequest,
    PoolingAnswer,
    PoolingRequest,
    classify_call,
    pooling_call,
)
from cpuserve.api.vectors.pooling.writer import ClassifyWriter, PoolingWriter

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
    """Return the vector or the class scores of each input, or of each token of each input."""
    return await generate(
        received, asked, lambda asked: pooling_call(asked, received.context), PoolingWriter
    )


@post(
    router,
    "/classify",
    schema=ClassifyRequest,
    response=ClassifyAnswer,
    poolings=("classify",),
    id_prefix="classify-",
    words=lambda _: {"prompt": "input"},
)
async def classify(received: RequestContext, asked: ClassifyRequest) -> Response:
    """Return the most likely class of each input, and the probability of each class."""
    return await generate(received, asked, classify_call, ClassifyWriter)
