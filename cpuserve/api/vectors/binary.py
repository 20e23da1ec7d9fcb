"""Vectors as bytes, in the number types and byte orders of vLLM."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from cpuserve.api.response.header_values import header_json
from cpuserve.api.vectors.inputs import VectorInputs
from cpuserve.api.vectors.numbers import NUMBER_TYPES, base64_of, vector_bytes
from cpuserve.base.errors import InvalidRequest

if TYPE_CHECKING:
    from cpuserve.api.request.context import RequestContext

OCTETS = "application/octet-stream"
FORMATS = ("float", "base64", "bytes", "bytes_only")
BYTE_ORDERS = ("native", "big", "little")
# The metadata of the format "bytes" are a header with about 130 bytes for each vector, and
# clients in Python read at most 64 KiB of one header.
MAX_DESCRIBED = 256


class VectorEncoding(VectorInputs, kw_only=True):
    """The inputs, and how the numbers of the vectors are written (the last two: fields of vLLM).

    encoding_format: float = JSON numbers; base64; bytes = the body is the bytes of all vectors,
      and the header `metadata` describes them; bytes_only = without this header.
    embed_dtype: the type of each number in base64 and in bytes, one of NUMBER_TYPES.
    endianness: the byte order of the numbers in base64 and in bytes, one of BYTE_ORDERS.
    """

    encoding_format: str | None = None
    embed_dtype: str | None = None
    endianness: str | None = None

    @property
    def is_binary(self) -> bool:
        """Whether the body of the response is bytes instead of JSON."""
        return self.encoding_format in FORMATS[2:]

    def bytes_of(self, values: array[float]) -> bytes:
        """Return the bytes of a vector."""
        order = self.byte_order(unset="native")
        return vector_bytes(values, self.embed_dtype or "float32", order)

    def base64_of(self, values: array[float]) -> str:
        """Return the base64 text of the bytes of a vector; they are little-endian by default."""
        order = self.byte_order(unset="little")
        return base64_of(values, self.embed_dtype or "float32", order)

    def byte_order(self, *, unset: str) -> str:
        """Return "big" or "little"; unset: the order if the request does not say one."""
        order = self.endianness or unset
        return sys.byteorder if order == "native" else order


@dataclass(frozen=True, slots=True)
class BinaryBody:
    """The body of a response that is no JSON, and its headers."""

    content: bytes
    headers: dict[str, str]


def check_encoding(body: VectorEncoding) -> None:
    """Raise InvalidRequest for an unknown format, number type or byte order."""
    for name, value, encodings in (
        ("encoding_format", body.encoding_format, FORMATS),
        ("embed_dtype", body.embed_dtype, tuple(NUMBER_TYPES)),
        ("endianness", body.endianness, BYTE_ORDERS),
    ):
        if value is not None and value not in encodings:
            msg = f"{name} must be one of {', '.join(encodings)}, got {value[:40]!r}"
            raise InvalidRequest(msg, param=name)
    if body.encoding_format == "bytes" and body.num_inputs > MAX_DESCRIBED:
        msg = (
            f"encoding_format bytes describes each vector in a header, so a request has at most "
            f"{MAX_DESCRIBED} inputs, got {body.num_inputs}: send bytes_only, or fewer inputs"
        )
        raise InvalidRequest(msg, param="encoding_format")


def binary_body(
    body: VectorEncoding,
    vectors: Sequence[tuple[array[float], tuple[int, ...]]],
    facts: dict[str, Any],
) -> BinaryBody:
    """Return the bytes of all vectors, and their metadata as vLLM describes them.

    vectors: the numbers of each result and their shape.
    facts: the other members of the metadata; see `facts_of`.
    """
    parts, items, start = [], [], 0
    for index, (values, shape) in enumerate(vectors):
        parts.append(body.bytes_of(values))
        end = start + len(parts[-1])
        items.append(
            {
                "index": index,
                "embed_dtype": body.embed_dtype or "float32",
                "endianness": body.endianness or "native",
                "start": start,
                "end": end,
                "shape": shape,
            }
        )
        start = end
    headers = {"content-type": OCTETS}
    if body.encoding_format == "bytes":
        headers["metadata"] = header_json({**facts, "data": items})
    return BinaryBody(b"".join(parts), headers)


def facts_of(request: RequestContext, usage: msgspec.Struct) -> dict[str, Any]:
    """Return what the metadata of a binary response say about the whole response."""
    return {
        "id": request.id,
        "created": request.created,
        "model": request.served.name,
        "usage": msgspec.structs.asdict(usage),
    }
