"""The types of the numbers of vectors in responses: floats, integers, bits and base64."""

from __future__ import annotations

import base64
import math
import struct
import sys
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TypeAlias

from cpuserve.base.errors import InvalidRequest

# The types of the numbers of a vector. The last two pack eight bits into a number.
KINDS = ("float", "int8", "uint8", "binary", "ubinary")
_PACKED = KINDS[3:]
_AT_ONCE = 1 << 14  # numbers
Numbers: TypeAlias = "array[float] | array[int]"


def check_kind(kind: str, width: int, field: str) -> None:
    """Raise InvalidRequest if vectors of `width` values cannot be packed into bits; see KINDS."""
    if kind in _PACKED and width % 8:
        msg = f"{field}: bits need vectors of a multiple of 8 values, not of {width}"
        raise InvalidRequest(msg, param=field)


def as_base64(values: array[float], kind: str) -> str:
    """Return the base64 text of a vector converted to integers or bits; see `converted`."""
    return base64.b64encode(bytes(n & 255 for n in _integers(values, kind))).decode()


def base64_of(values: array[float], kind: str = "float32", order: str = "little") -> str:
    """Return the base64 text of the bytes of `values`; see `vector_bytes`."""
    return base64.b64encode(vector_bytes(values, kind, order)).decode()


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
