"""The types of the numbers of vectors in responses: floats, integers, bits and base64."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Sequence

from cpuserve.base.errors import InvalidRequest

# The types of the numbers of a vector. The last two pack eight bits into a number.
KINDS = ("float", "int8", "uint8", "binary", "ubinary")
_PACKED = KINDS[3:]


def check_kind(kind: str, width: int, field: str) -> None:
    """Raise InvalidRequest if vectors of `width` values cannot be packed into bits; see KINDS."""
    if kind in _PACKED and width % 8:
        msg = f"{field}: bits need vectors of a multiple of 8 values, not of {width}"
        raise InvalidRequest(msg, param=field)


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
