"""Cosines, sines, exponentials and logarithms with the same bits for every version of numpy.

numpy changes the last bits of these functions between versions and between CPUs. Keys, values and
states that engines share (`--prefix-cache-dir`) have to be equal, so tables and weights that they
are computed with come from here: sums and products of fp64, which IEEE 754 rounds in one way only,
and the functions of the C library in fp64. The results are rounded to fp32. An error of one unit
in the last place of fp64 changes such a result in one of some 2^28 cases.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # building a program needs no numpy
    import numpy as np
    import numpy.typing as npt

    Float32 = npt.NDArray[np.float32]
    Float64 = npt.NDArray[np.float64]

# pi / 2 as three numbers. The first two have 23 bits, so that their products with a number of
# quarter turns below 2^30 are exact.
_QUARTER = (
    float.fromhex("0x1.921fb4p+0"),
    float.fromhex("0x1.4442dp-24"),
    float.fromhex("0x1.8469898cc5170p-48"),
)
# Angles are reduced to at most pi / 4: the next term of either series is below 2^-45.
_SINE = tuple((-1.0) ** i / math.factorial(2 * i + 1) for i in range(7))
_COSINE = tuple((-1.0) ** i / math.factorial(2 * i) for i in range(8))
_ROWS = 4096  # fp64 numbers of a part, so that its steps stay in the cache of a core


def cos_sin(angles: npt.NDArray[np.floating]) -> tuple[Float32, Float32]:
    """Return (cosines, sines) of the angles, in radians and below 2^30, as fp32 of their shape."""
    import numpy as np

    flat = angles.reshape(-1)
    cosines, sines = np.empty(len(flat), np.float32), np.empty(len(flat), np.float32)
    for start in range(0, len(flat), _ROWS):
        part = slice(start, start + _ROWS)
        cosines[part], sines[part] = _cos_sin(flat[part].astype(np.float64))
    return cosines.reshape(angles.shape), sines.reshape(angles.shape)


def _cos_sin(angles: Float64) -> tuple[Float64, Float64]:
    """Return (cosines, sines) of angles [N], with an error of about 2^-45."""
    import numpy as np

    turns = np.rint(angles * (2 / math.pi))
    rest = angles
    for part in _QUARTER:
        rest = rest - turns * part
    square = rest * rest
    sine, cosine = rest * _series(_SINE, square), _series(_COSINE, square)
    quarter = turns.astype(np.int32)
    odd = (quarter & 1).astype(bool)
    # A quarter turn makes (cos, sin) to (-sin, cos).
    cosines, sines = np.where(odd, sine, cosine), np.where(odd, cosine, sine)
    np.negative(cosines, out=cosines, where=((quarter + 1) & 2).astype(bool))
    np.negative(sines, out=sines, where=(quarter & 2).astype(bool))
    return cosines, sines


def _series(terms: tuple[float, ...], x: Float64) -> Float64:
    """Return terms[0] + terms[1] x + terms[2] x^2 + ..., by Horner's rule."""
    total = x * terms[-1]
    for term in terms[-2:0:-1]:
        total += term
        total *= x
    total += terms[0]
    return total


def exponential(x: Float32) -> Float32:
    """Return e^x as fp32 of the same shape; infinity beyond the range of fp32."""
    # e^89 is beyond the range of fp32, and e^710 beyond the range of fp64, where math.exp fails.
    return _mapped(lambda value: math.exp(min(value, 89.0)), x)


def logarithm(x: Float32) -> Float32:
    """Return the natural logarithm of positive numbers as fp32 of the same shape.

    Raises:
        ValueError: a number is not positive.
    """
    return _mapped(math.log, x)


def _mapped(function: Callable[[float], float], x: Float32) -> Float32:
    import numpy as np

    with np.errstate(over="ignore"):
        values = np.fromiter(map(function, x.reshape(-1).tolist()), np.float64, x.size)
        return values.astype(np.float32).reshape(x.shape)
