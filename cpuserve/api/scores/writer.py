"""Write the answers of /rerank and /score."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from cpuserve.api.scores.schema import (
    Document,
    RerankAnswer,
    RerankResult,
    ScoreAnswer,
    ScoreItem,
    ScoringUsage,
    texts_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from cpuserve.api.request.context import RequestContext
    from cpuserve.api.scores.schema import RerankRequest
    from cpuserve.serving.events import Folded

    Scores = Callable[[list[bytes]], list[float]]


def rerank_body(
    answer: Folded, received: RequestContext, asked: RerankRequest, model: str, scores: Scores
) -> bytes:
    """Return the answer of /rerank as JSON; documents of equal scores keep their order."""
    texts = texts_of(asked.documents, "documents")
    shown = asked.return_documents is not False
    results = [
        RerankResult(index, score, Document(texts[index]) if shown else None)
        for index, score in sorted(enumerate(scores(_vectors(answer))), key=lambda item: -item[1])
    ]
    whole = RerankAnswer(received.id, model, _usage(answer), results[: asked.top_n])
    return msgspec.json.encode(whole)


def score_body(answer: Folded, received: RequestContext, model: str, scores: Scores) -> bytes:
    """Return the answer of /score as JSON."""
    found = scores(_vectors(answer))
    items = [ScoreItem(index, "score", score) for index, score in enumerate(found)]
    usage = _usage(answer)
    whole = ScoreAnswer(received.id, "list", received.created, model, items, usage)
    return msgspec.json.encode(whole)


def _vectors(answer: Folded) -> list[bytes]:
    return [choice.vector for choice in answer.choices]


def _usage(answer: Folded) -> ScoringUsage:
    return ScoringUsage(answer.usage.prompt, answer.usage.prompt)
