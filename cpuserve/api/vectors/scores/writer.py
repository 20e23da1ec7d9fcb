"""Write the responses of /rerank and /score."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from cpuserve.api.vectors.cohere.schema import CohereMeta, CohereUnits, CohereVersion
from cpuserve.api.vectors.scores.schema import (
    Document,
    MixedbreadRanks,
    RankedDocument,
    RankedInput,
    RerankAnswer,
    RerankResult,
    ScoreAnswer,
    ScoreItem,
    ScoringUsage,
    VoyageRanks,
)

if TYPE_CHECKING:
    from cpuserve.api.request.context import RequestContext
    from cpuserve.api.vectors.scores.schema import RerankRequest, ScoreRequest
    from cpuserve.serving.calls.events import WholeResponse
    from cpuserve.serving.generation.generate import Generation
    from cpuserve.serving.vectors.similarity import PairScores


class RerankWriter:
    """Writes the response of /rerank; documents with equal scores keep their order."""

    def __init__(
        self,
        received: RequestContext,
        asked: RerankRequest,
        _generation: Generation,
        scores: PairScores,
        *,
        meta: bool = False,
    ) -> None:
        """meta: whether the response has the member `meta` of Cohere."""
        self._received = received
        self._asked = asked
        self._scores = scores
        self._meta = meta

    def whole(self, response: WholeResponse) -> bytes:
        """Return the whole response as JSON."""
        asked, received = self._asked, self._received
        texts = asked.texts
        ranked = sorted(enumerate(self._scores.of(_vectors(response))), key=lambda item: -item[1])
        ranked = ranked[: asked.most or None]
        shown = [texts[index] if asked.shows_texts else None for index, _ in ranked]
        model, usage = received.served.name, _usage(response)
        form = "" if self._meta else asked.form
        if form == "voyage":
            data = [RankedDocument(*each, text) for each, text in zip(ranked, shown, strict=True)]
            return msgspec.json.encode(VoyageRanks("list", data, model, usage))
        if form == "mixedbread":
            items = [
                RankedInput(*each, "rank_result", msgspec.UNSET if text is None else text)
                for each, text in zip(ranked, shown, strict=True)
            ]
            return msgspec.json.encode(MixedbreadRanks("list", items, model, usage))
        results = [
            RerankResult(index, score, None if text is None else Document(text))
            for (index, score), text in zip(ranked, shown, strict=True)
        ]
        answer = RerankAnswer(received.id, model, usage, results)
        if self._meta:
            units = CohereUnits(usage.prompt_tokens, search_units=1)
            answer.meta = CohereMeta(CohereVersion("2"), units)
        return msgspec.json.encode(answer)


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
