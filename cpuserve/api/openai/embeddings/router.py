"""POST /v1/embeddings."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request, Response

from cpuserve.api.openai.embeddings.schema import (
    EmbeddingAnswer,
    EmbeddingRequest,
    check_dimensions,
    to_call,
)
from cpuserve.api.openai.embeddings.writer import answer_body
from cpuserve.api.request.context import read_call
from cpuserve.api.response.openapi import json_body
from cpuserve.api.response.writer import respond_whole
from cpuserve.errors import InvalidRequest
from cpuserve.serving.generate import prepare

router = APIRouter()


@router.post("/v1/embeddings", openapi_extra=json_body(EmbeddingRequest, EmbeddingAnswer))
async def create_embeddings(request: Request) -> Response:
    """Return a vector for each input."""
    async with read_call(request, "embd-", EmbeddingRequest) as (received, asked):
        model = await received.choose(asked.model)
        call = to_call(asked)
        check_dimensions(asked.dimensions, received.context)
        try:
            generation = await prepare(received.served, call, received.body_bytes)
        except InvalidRequest as error:
            if error.param == "prompt":
                error.param = "input"  # this endpoint's name for it
            raise
    return respond_whole(generation, partial(answer_body, asked=asked, model=model))
