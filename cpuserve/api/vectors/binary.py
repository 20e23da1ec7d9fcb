"""Vectors as bytes, in the number types and byte orders of vLLM."""

from __future__ import annotations

import base64
import math
import struct
import sys
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from cpuserve.api.vectors.inputs import VectorInputs
from cpuserve.base.errors import InvalidRequest

if TYPE_CHECKING:
    from cpuserve.api.request.context import RequestContext

Numbers: TypeAlias = "array[float] | array[int]"
OCTETS = "application/octet-stream"
FORMATS = ("float", "base64", "bytes", "bytes_only")
BYTE_ORDERS = ("native", "big", "little")
# The metadata of the format "bytes" are a header with about 130 bytes for each vector, and
# clients in Python read at most 64 KiB of one header.
MAX_DESCRIBED = 256
_AT_ONCE = 1 << 14  # numbers


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
        return base64.b64encode(vector_bytes(values, self.embed_dtype or "float32", order)).decode()

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
    for name, value, known in (
        ("encoding_format", body.encoding_format, FORMATS),
        ("embed_dtype", body.embed_dtype, tuple(NUMBER_TYPES)),
        ("endianness", body.endianness, BYTE_ORDERS),
    ):
        if value is not None and value not in known:
            msg = f"{name} must be one of {', '.join(known)}, got {value[:40]!r}"
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
        text = msgspec.json.encode({**facts, "data": items}).decode()
        # A header has ASCII only, and the name of a model may have more.
        headers["metadata"] = text.encode("ascii", "backslashreplace").decode()
    return BinaryBody(b"".join(parts), headers)


def facts_of(request: RequestContext, usage: msgspec.Struct) -> dict[str, Any]:
    """Return what the metadata of a binary response say about the whole response."""
    return {
        "id": request.id,
        "created": request.created,
        "model": request.served.name,
        "usage": msgspec.structs.asdict(usage),
    }


def vector_bytes(values: array[float], kind: str, order: str) -> bytes:
    """Return the bytes of fp32 `values` as numbers of the type `kind`, in a byte order.

    kind: one of NUMBER_TYPES; numbers are rounded to the nearest, ties to even, as torch does.
    order: "big" or "little".
    """
    numbers = NUMBER_TYPES[kind](values)
    if order != sys.byteorder:
        numbers = numbers[:]
        numbers.byteswap()
    return numbers.tobytes()


# The front end has no numpy, so the conversions are Python's own; a thread runs long ones.
def _as_they_are(values: array[float]) -> Numbers:
    return values


def _float16(values: array[float]) -> Numbers:
    numbers = array("H")
    for begin in range(0, len(values), _AT_ONCE):  # a call of C keeps the GIL
        part = values[begin : begin + _AT_ONCE]
        try:
            content = struct.pack(f"{len(part)}e", *part)
        except OverflowError:  # numbers that round to more than 65504 become infinite, as in torch
            shown = (math.copysign(math.inf, x) if abs(x) >= 65520 else x for x in part)
            content = struct.pack(f"{len(part)}e", *shown)
        numbers.frombytes(content)
    return numbers


def _bfloat16(values: array[float]) -> Numbers:
    """Return the upper 16 bits of each number, rounded; NaNs are those of torch."""
    return array(
        "H",
        (
            (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 if bits & 0x7FFFFFFF <= 0x7F800000 else 0x7FC0
            for bits in array("I", values.tobytes())
        ),
    )


def _float8(exponent_bits: int, last: int) -> Callable[[array[float]], Numbers]:
    """Return a function that converts to an 8-bit float.

    last: the code of numbers that are too large: infinity, or the largest if there is none.
    """
    mantissa_bits, bias = 7 - exponent_bits, (1 << (exponent_bits - 1)) - 1

    def magnitude(code: int) -> float:
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        fraction = mantissa / (1 << mantissa_bits) + (exponent > 0)
        return math.ldexp(fraction, max(exponent, 1) - bias)

    # The middles between the values of a code and of the next one, which grow with the code.
    middles = [(magnitude(code) + magnitude(code + 1)) / 2 for code in range(last)]

    def code_of(value: float) -> int:
        size = abs(value)
        code = 0x7F if size != size else bisect_left(middles, size)
        if code < last and middles[code] == size:
            code += code & 1
        return code | (math.copysign(1.0, value) < 0) << 7

    return lambda values: array("B", map(code_of, values))


# The types of numbers in bytes, each with a function that converts fp32 numbers to it.
NUMBER_TYPES: dict[str, Callable[[array[float]], Numbers]] = {
    "float32": _as_they_are,
    "float16": _float16,
    "bfloat16": _bfloat16,
    "fp8_e4m3": _float8(4, 0x7E),
    "fp8_e5m2": _float8(5, 0x7C),
}
