"""Write the responses of the TEI endpoints for embeddings, similarities and ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from cpuserve.api.response.in_parts import in_parts
from cpuserve.api.vectors.tei.schema import SparseValue, TextRank
from cpuserve.serving.calls.events import floats_of
from cpuserve.serving.vectors.classes import rows_of
from cpuserve.serving.vectors.matryoshka import shortened
from cpuserve.serving.vectors.pooling_tasks import token_weights
from cpuserve.serving.vectors.similarity import cosines

if TYPE_CHECKING:
    from cpuserve.api.request.context import RequestContext
    from cpuserve.api.vectors.tei.schema import (
        EmbedAllRequest,
        EmbedSparseRequest,
        SimilarityRequest,
        TeiEmbedRequest,
        TeiRerankRequest,
    )
    from cpuserve.serving.calls.events import WholeResponse
    from cpuserve.serving.generation.generate import Generation


class TeiEmbedWriter:
    """Writes the response to a request to /embed."""

    def __init__(
        self, _received: RequestContext, asked: TeiEmbedRequest, _generation: Generation
    ) -> None:
        self._asked = asked

    def whole(self, response: WholeResponse) -> bytes:
        """Return the whole response as JSON."""
        asked, unit = self._asked, self._asked.normalize is not False
        vectors = (floats_of(choice.vector) for choice in response.choices)
        return msgspec.json.encode(
            in_parts(shortened(vector, asked.dimensions, unit=unit).tolist() for vector in vectors)
        )


class EmbedAllWriter:
    """Writes the response to a request to /embed_all."""

    def __init__(
        self, _received: RequestContext, _asked: EmbedAllRequest, _generation: Generation
    ) -> None:
        pass

    def whole(self, response: WholeResponse) -> bytes:
        """Return the whole response as JSON."""
        return msgspec.json.encode(
            in_parts(
                in_parts(rows_of(floats_of(each.vector), len(each.prompt.ids)))
                for each in response.choices
            )
        )


class EmbedSparseWriter:
    """Writes the response to a request to /embed_sparse."""

    def __init__(
        self, received: RequestContext, _asked: EmbedSparseRequest, _generation: Generation
    ) -> None:
        self._context = received.context

    def whole(self, response: WholeResponse) -> bytes:
        """Return the whole response as JSON."""
        found = [
            token_weights(floats_of(each.vector), each.prompt.ids, self._context)
            for each in response.choices
        ]
        return msgspec.json.encode(
            in_parts([SparseValue(index, value) for index, value in each.items()] for each in found)
        )


class SimilarityWriter:
    """Writes the response of /similarity: the cosine of each sentence and the source sentence."""

    def __init__(
        self, _received: RequestContext, _asked: SimilarityRequest, _generation: Generation
    ) -> None:
        pass

    def whole(self, response: WholeResponse) -> bytes:
        """Return the whole response as JSON."""
        vectors = [choice.vector for choice in response.choices]
        return msgspec.json.encode(cosines(vectors, [(0, i) for i in range(1, len(vectors))]))


class TeiRerankWriter:
    """Writes the response of /rerank as TEI does; texts with equal scores keep their order."""

    def __init__(
        self, _received: RequestContext, asked: TeiRerankRequest, _generation: Generation
    ) -> None:
        self._asked = asked

    def whole(self, response: WholeResponse) -> bytes:
        """Return the whole response as JSON."""
        scores = [floats_of(choice.vector)[0] for choice in response.choices]
        shown = self._asked.texts if self._asked.return_text else [None] * len(scores)
        ranks = [TextRank(index, score, shown[index]) for index, score in enumerate(scores)]
        return msgspec.json.encode(sorted(ranks, key=lambda rank: -rank.score))
