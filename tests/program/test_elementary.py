"""Cosines, sines, exponentials and logarithms have the same bits with every version of numpy."""

import hashlib
import math

import mpmath
import numpy as np
import pytest

from cpuserve.program.elementary import cos_sin, exponential, logarithm
from cpuserve.program.ops import Rope
from cpuserve.program.tables import line_waves, plane_waves, query_scales, rope_tables

ANGLES = np.concatenate(
    [np.random.default_rng(0).uniform(0, most, 300) for most in (1.0, 10.0, 1e6, 2.0**30)]
    + [np.array([0.0, 2.0**-40, math.pi / 4, math.pi / 2, math.pi, 2.0**30 - 64])]
).astype(np.float32)


def rounded(values):
    """Return the values as fp32; mpf numbers of 120 bits are rounded to fp64 on the way."""
    return np.array([float(value) for value in values], np.float32)


def test_cosines_and_sines_are_those_of_120_bits_rounded_to_fp32():
    with mpmath.workprec(120):
        exact = [
            (mpmath.cos(mpmath.mpf(float(a))), mpmath.sin(mpmath.mpf(float(a)))) for a in ANGLES
        ]
    cosines, sines = cos_sin(ANGLES)
    np.testing.assert_array_equal(cosines, rounded(c for c, _ in exact))
    np.testing.assert_array_equal(sines, rounded(s for _, s in exact))


def test_cosines_and_sines_keep_the_shape_of_the_angles():
    grid = np.outer(np.arange(300, dtype=np.float32), np.float32([1.0, 0.25, 1e-4]))
    flat = cos_sin(grid.reshape(-1))
    for whole, part in zip(cos_sin(grid), flat, strict=True):
        assert whole.dtype == np.float32
        np.testing.assert_array_equal(whole.reshape(-1), part)


def test_exponentials_and_logarithms_are_rounded_once():
    x = np.random.default_rng(1).normal(0, 20, 2000).astype(np.float32)
    with mpmath.workprec(120):
        powers = rounded(mpmath.exp(mpmath.mpf(float(v))) for v in x)
        logs = rounded(mpmath.log(abs(mpmath.mpf(float(v)))) for v in x)
    np.testing.assert_array_equal(exponential(x), powers)
    np.testing.assert_array_equal(logarithm(np.abs(x)), logs)


def test_exponentials_end_at_the_range_of_fp32():
    ends = exponential(np.array([-2000, -104, 0, 88.5, 89, 2000], np.float32))
    np.testing.assert_array_equal(ends, np.float32([0, 0, 1, ends[3], np.inf, np.inf]))
    assert np.isfinite(ends[3])


def digest(*arrays):
    return hashlib.sha256(b"".join(a.astype("<f4").tobytes() for a in arrays)).hexdigest()[:16]


@pytest.mark.parametrize(
    ("tables", "bits"),
    [
        (
            lambda: rope_tables(ROPE, np.arange(0, 1 << 17, 7, dtype=np.int32), long=False),
            "9c8534cbe94f761f",
        ),
        (
            lambda: [query_scales(0.1, 8192, np.arange(0, 1 << 20, 99, dtype=np.int32))],
            "16ba10a849c3dd62",
        ),
        (lambda: [plane_waves(24, 64)], "5142b49233f68083"),
        (lambda: [line_waves(2048, 64, 31.0)], "4719a1fa4921713e"),
    ],
    ids=["rope", "scales", "plane", "line"],
)
def test_tables_have_the_recorded_bits(tables, bits):
    assert digest(*tables()) == bits


ROPE = Rope(64, tuple(500000.0 ** (-i / 32) for i in range(32)), 1.25)
