"""POST /rerank and /score."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Response

from cpuserve.api.request.context import RequestContext
from cpuserve.api.route import generate, post
from cpuserve.api.vectors.cohere.errors import COHERE
from cpuserve.api.vectors.scores.schema import (
    MixedbreadRanks,
    RerankAnswer,
    RerankRequest,
    ScoreAnswer,
    ScoreRequest,
    VoyageRanks,
    rerank_call,
    score_call,
)
from cpuserve.api.vectors.scores.writer import RerankWriter, ScoreWriter
from cpuserve.config.engine import EMBEDDINGS
from cpuserve.serving.vectors.similarity import PairScores

router = APIRouter()
# Embedding models score pairs by the cosine of their vectors.
_SCORING = {"rank", *EMBEDDINGS}


def _words(asked: RerankRequest) -> dict[str, str]:
    name = "input" if asked.form == "mixedbread" else "documents"
    return {"prompt": name, **({"cut": ", or omit truncation"} if asked.form == "voyage" else {})}


@post(
    router,
    "/v2/rerank",
    schema=RerankRequest,
    response=RerankAnswer,
    dialect=COHERE,
    id_prefix="rerank-",
    words=_words,
    poolings=_SCORING,
)
async def cohere_rerank(received: RequestContext, asked: RerankRequest) -> Response:
    """Rank documents by their relevance for a query, in the format of Cohere."""
    return await _ranked(received, asked, meta=True)


@post(
    router,
    "/v1/rerank",
    "/v1/reranking",
    "/reranking",
    schema=RerankRequest,
    response=(RerankAnswer, VoyageRanks, MixedbreadRanks),
    id_prefix="rerank-",
    words=_words,
    poolings=_SCORING,
)
async def rerank(received: RequestContext, asked: RerankRequest) -> Response:
    """Rank documents by their relevance for a query."""
    return await _ranked(received, asked)


async def _ranked(
    received: RequestContext, asked: RerankRequest, *, meta: bool = False
) -> Response:
    scores = PairScores()
    return await generate(
        received,
        asked,
        lambda asked: scores.call(received.context, rerank_call(asked)),
        partial(RerankWriter, scores=scores, meta=meta),
    )


@post(
    router,
    "/v1/score",
    "/score",
    schema=ScoreRequest,
    response=ScoreAnswer,
    id_prefix="score-",
    words=lambda asked: {"prompt": asked.names[1]},
    poolings=_SCORING,
)
async def score(received: RequestContext, asked: ScoreRequest) -> Response:
    """Return the relevance score of each pair of texts."""
    scores = PairScores()
    return await generate(
        received,
        asked,
        lambda asked: scores.call(received.context, score_call(asked)),
        partial(ScoreWriter, scores=scores),
    )
