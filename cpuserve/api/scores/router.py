"""POST /rerank and /score."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from cpuserve.api.request.context import read_call
from cpuserve.api.response.openapi import json_body
from cpuserve.api.response.writer import respond_whole
from cpuserve.api.scores.schema import (
    RerankAnswer,
    RerankRequest,
    ScoreAnswer,
    ScoreRequest,
    rerank_call,
    score_call,
)
from cpuserve.api.scores.writer import rerank_body, score_body
from cpuserve.errors import InvalidRequest
from cpuserve.serving.events import floats_of
from cpuserve.serving.generate import prepare
from cpuserve.serving.similarity import cosines, embedding_call

if TYPE_CHECKING:
    from cpuserve.api.request.context import RequestContext
    from cpuserve.serving.call import GenerateCall
    from cpuserve.serving.generate import Generation

Scores = Callable[[list[bytes]], list[float]]  # of the vectors in an answer

router = APIRouter()


@router.post("/rerank", openapi_extra=json_body(RerankRequest, RerankAnswer))
@router.post("/v1/rerank", openapi_extra=json_body(RerankRequest, RerankAnswer))
@router.post("/v2/rerank", openapi_extra=json_body(RerankRequest, RerankAnswer))
async def rerank(request: Request) -> Response:
    """Order documents by how well they answer a query."""
    async with read_call(request, "rerank-", RerankRequest) as (received, asked):
        model = await received.choose(asked.model)
        generation, scores = await _prepare(received, rerank_call(asked), "documents")
    return respond_whole(
        generation,
        partial(rerank_body, received=received, asked=asked, model=model, scores=scores),
    )


@router.post("/score", openapi_extra=json_body(ScoreRequest, ScoreAnswer))
@router.post("/v1/score", openapi_extra=json_body(ScoreRequest, ScoreAnswer))
async def score(request: Request) -> Response:
    """Return the score of each pair of texts."""
    async with read_call(request, "score-", ScoreRequest) as (received, asked):
        model = await received.choose(asked.model)
        generation, scores = await _prepare(received, score_call(asked), "text_2")
    return respond_whole(
        generation, partial(score_body, received=received, model=model, scores=scores)
    )


async def _prepare(
    received: RequestContext, call: GenerateCall, texts: str
) -> tuple[Generation, Scores]:
    """Return the generation of a call, and what makes scores of its answer.

    texts: the endpoint's name for what is in the prompts.
    """
    scores: Scores = _own_scores
    try:
        if received.context.embeds:
            call, places = embedding_call(call)
            scores = partial(cosines, places=places)
        return await prepare(received.served, call, received.body_bytes), scores
    except InvalidRequest as error:
        if error.param == "prompt":
            error.param = texts
        raise


def _own_scores(vectors: list[bytes]) -> list[float]:
    """Return the scores of a reranker, whose vectors have one number."""
    return [floats_of(vector)[0] for vector in vectors]
