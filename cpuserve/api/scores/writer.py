"""Write the responses of /rerank and /score."""

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
    from cpuserve.api.request.context import RequestContext
    from cpuserve.api.scores.schema import RerankRequest, ScoreRequest
    from cpuserve.serving.events import WholeResponse
    from cpuserve.serving.generate import Generation
    from cpuserve.serving.similarity import PairScores


class RerankWriter:
    """Writes the response of /rerank; documents with equal scores keep their order."""

    def __init__(
        self,
        received: RequestContext,
        asked: RerankRequest,
        _generation: Generation,
        scores: PairScores,
    ) -> None:
        self._received = received
        self._asked = asked
        self._scores = scores

    def whole(self, response: WholeResponse) -> bytes:
        """Return the whole response as JSON."""
        asked, received = self._asked, self._received
        texts = texts_of(asked.documents, "documents")
        shown = asked.return_documents is not False
        ranked = sorted(enumerate(self._scores.of(_vectors(response))), key=lambda item: -item[1])
        results = [
            RerankResult(index, score, Document(texts[index]) if shown else None)
            for index, score in ranked[: asked.top_n or None]
        ]
        model = received.served.name
        return msgspec.json.encode(RerankAnswer(received.id, model, _usage(response), results))


class ScoreWriter:
    """Writes the response to a request to /score."""

    def __init__(
        self,
        received: RequestContext,
        _asked: ScoreRequest,
        _generation: Generation,
        scores: PairScores,
    ) -> None:
        self._received = received
        self._scores = scores

    def whole(self, response: WholeResponse) -> bytes:
        """Return the whole response as JSON."""
        received, found = self._received, self._scores.of(_vectors(response))
        items = [ScoreItem(index, "score", score) for index, score in enumerate(found)]
        model, usage = received.served.name, _usage(response)
        whole = ScoreAnswer(received.id, "list", received.created, model, items, usage)
        return msgspec.json.encode(whole)


def _vectors(response: WholeResponse) -> list[bytes]:
    return [choice.vector for choice in response.choices]


def _usage(response: WholeResponse) -> ScoringUsage:
    return ScoringUsage(response.usage.prompt, response.usage.prompt)
