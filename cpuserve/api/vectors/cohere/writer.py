"""Write the responses of /v2/embed and /v1/embed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from cpuserve.api.response.in_parts import in_parts
from cpuserve.api.vectors.cohere.schema import (
    CohereEmbeddings,
    CohereEmbedRequest,
    CohereMeta,
    CohereUnits,
    CohereVectors,
    CohereVersion,
    texts_of,
)
from cpuserve.api.vectors.openai.writer import converted
from cpuserve.serving.calls.events import floats_of
from cpuserve.serving.vectors.matryoshka import shortened

if TYPE_CHECKING:
    from cpuserve.api.request.context import RequestContext
    from cpuserve.api.vectors.cohere.schema import CohereFields
    from cpuserve.serving.calls.events import WholeResponse
    from cpuserve.serving.generation.generate import Generation

_BY_TYPE, _FLOATS = "embeddings_by_type", "embeddings_floats"


class CohereWriter:
    """Writes the response to one request; version 1 may have a plain list of vectors."""

    def __init__(
        self, received: RequestContext, asked: CohereFields, _generation: Generation
    ) -> None:
        self._id = received.id
        self._asked = asked

    def whole(self, response: WholeResponse) -> bytes:
        """Return the whole response as JSON."""
        asked, version, dimensions = self._asked, "1", None
        if isinstance(asked, CohereEmbedRequest):
            version, dimensions = "2", asked.output_dimension
        vectors = [shortened(floats_of(each.vector), dimensions) for each in response.choices]
        types = asked.embedding_types or (["float"] if version == "2" else [])
        found: CohereVectors | list[list[float]]
        if not types:
            found = in_parts(vector.tolist() for vector in vectors)
        else:
            found = CohereVectors()
            for kind in types:
                value = in_parts(converted(vector, kind) for vector in vectors)
                setattr(found, "floats" if kind == "float" else kind, value)
        meta = CohereMeta(CohereVersion(version), CohereUnits(response.usage.prompt))
        named = _BY_TYPE if types else _FLOATS
        return msgspec.json.encode(CohereEmbeddings(self._id, found, texts_of(asked), meta, named))
