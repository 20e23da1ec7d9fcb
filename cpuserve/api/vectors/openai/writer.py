"""Write the response of POST /v1/embeddings."""

from __future__ import annotations

import base64
import sys
from array import array
from typing import TYPE_CHECKING

import msgspec

from cpuserve.api.response.in_parts import in_parts
from cpuserve.api.vectors.openai.schema import EmbeddingAnswer, EmbeddingItem, EmbeddingUsage
from cpuserve.serving.calls.events import floats_of
from cpuserve.serving.vectors.matryoshka import shortened

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpuserve.api.request.context import RequestContext
    from cpuserve.api.vectors.openai.schema import EmbeddingRequest
    from cpuserve.serving.calls.events import WholeResponse
    from cpuserve.serving.generation.generate import Generation


class EmbeddingWriter:
    """Writes the response to one embedding request."""

    def __init__(
        self, received: RequestContext, asked: EmbeddingRequest, _generation: Generation
    ) -> None:
        self._model = received.served.name
        self._asked = asked

    def whole(self, response: WholeResponse) -> bytes:
        """Return the whole response as JSON."""
        as_text, prompt = self._asked.as_text, response.usage.prompt

        def item(index: int, vector: bytes) -> EmbeddingItem:
            asked = self._asked
            values = shortened(floats_of(vector), asked.length, unit=asked.unit)
            shown = as_base64(values, asked.kind) if as_text else converted(values, asked.kind)
            return EmbeddingItem("embedding", index, shown)

        data = in_parts(item(choice.index, choice.vector) for choice in response.choices)
        usage = EmbeddingUsage(prompt, prompt)
        return msgspec.json.encode(EmbeddingAnswer("list", data, self._model, usage))


def as_base64(values: array[float], kind: str) -> str:
    """Return the base64 text of a vector converted to `kind`; see `converted`."""
    if kind == "float":
        return base64_of(values)
    return base64.b64encode(bytes(n & 255 for n in _integers(values, kind))).decode()


def base64_of(values: array[float]) -> str:
    """Return the base64 text of the little-endian fp32 bytes of `values`."""
    if sys.byteorder == "big":
        values = array("f", values)
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode()


def converted(vector: array[float], kind: str) -> list[float] | list[int] | str:
    """Return a vector of unit length converted to the embedding type `kind`."""
    if kind == "float":
        return vector.tolist()
    return base64_of(vector) if kind == "base64" else _integers(vector, kind)


def _integers(vector: array[float], kind: str) -> list[int]:
    """Return a vector of unit length as int8 or uint8 values, or as bytes of eight bits each."""
    if kind in ("int8", "uint8"):
        shift = 128 if kind == "uint8" else 0
        return [max(-128, min(127, round(127 * x))) + shift for x in vector]
    shift = 0 if kind == "ubinary" else 128
    return [_byte(vector[at : at + 8]) - shift for at in range(0, len(vector), 8)]


def _byte(values: Sequence[float]) -> int:
    """Return 8 values as the bits of a byte, first value highest: 1 if the value is above 0."""
    return sum((value > 0) << (7 - place) for place, value in enumerate(values))
