"""Write the response of POST /v1/embeddings."""

from __future__ import annotations

import base64
import math
import sys
from array import array
from typing import TYPE_CHECKING

import msgspec

from cpuserve.api.openai.embeddings.schema import EmbeddingAnswer, EmbeddingItem, EmbeddingUsage
from cpuserve.serving.events import floats_of

if TYPE_CHECKING:
    from cpuserve.api.openai.embeddings.schema import EmbeddingRequest
    from cpuserve.api.request.context import RequestContext
    from cpuserve.serving.events import WholeResponse
    from cpuserve.serving.generate import Generation


class EmbeddingWriter:
    """Writes the response to one embedding request."""

    def __init__(
        self, received: RequestContext, asked: EmbeddingRequest, _generation: Generation
    ) -> None:
        self._model = received.served.name
        self._asked = asked

    def whole(self, response: WholeResponse) -> bytes:
        """Return the whole response as JSON."""
        as_text, prompt = self._asked.encoding_format == "base64", response.usage.prompt

        def item(index: int, vector: bytes) -> EmbeddingItem:
            asked = self._asked
            values = shortened(floats_of(vector), asked.dimensions, unit=asked.unit)
            shown = base64_of(values) if as_text else values.tolist()
            return EmbeddingItem("embedding", index, shown)

        data = [item(choice.index, choice.vector) for choice in response.choices]
        usage = EmbeddingUsage(prompt, prompt)
        return msgspec.json.encode(EmbeddingAnswer("list", data, self._model, usage))


def shortened(values: array[float], dimensions: int | None, *, unit: bool = True) -> array[float]:
    """Return the first `dimensions` values (None: all), rescaled to length 1 (Matryoshka).

    unit: whether the shortened vector is rescaled to length 1.
    """
    if dimensions is None or dimensions >= len(values):
        return values
    cut = values[:dimensions]
    if not unit:
        return cut
    length = math.sqrt(math.fsum(v * v for v in cut)) or 1.0
    return array("f", (v / length for v in cut))


def base64_of(values: array[float]) -> str:
    """Return the base64 text of the little-endian fp32 bytes of `values`."""
    if sys.byteorder == "big":
        values = array("f", values)
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode()
