"""Pooling: from the vectors of a sequence's tokens to its embedding."""

from __future__ import annotations

from typing import cast

import numpy as np
import numpy.typing as npt

from cpuserve.core.pool import Pool

Float64 = npt.NDArray[np.float64]


class LastToken:
    """The vector of the last token: in a decoder, only that token attends to all others."""

    reads_prefixes = True

    def __init__(self) -> None:
        self._vector: Float64 = np.zeros(0)

    def positions(self, start: int, end: int, length: int) -> range:
        """Return the last token's position."""
        return range(max(start, length - 1), end)

    def add(self, vector: object) -> None:
        """Keep the vector."""
        self._vector = np.asarray(vector, np.float64)

    def result(self) -> bytes | None:
        """Return the embedding."""
        return _normalized(self._vector)


class FirstToken(LastToken):
    """The vector of the first token ("cls")."""

    reads_prefixes = False

    def positions(self, start: int, end: int, length: int) -> range:
        """Return the first token's position."""
        del length
        return range(start, min(end, 1))


class Mean:
    """The mean of all tokens' vectors.

    They are added one after another, so the bits do not depend on how a prompt is cut into chunks.
    """

    reads_prefixes = False

    def __init__(self) -> None:
        self._sum: Float64 = np.zeros(0)
        self._count = 0

    def positions(self, start: int, end: int, length: int) -> range:
        """Return the positions that have not been added before a preemption."""
        del length
        return range(max(start, self._count), end)

    def add(self, vector: object) -> None:
        """Add the vector to the sum."""
        values = np.asarray(vector, np.float64)
        self._sum = self._sum + values if self._count else values
        self._count += 1

    def result(self) -> bytes | None:
        """Return the embedding; its length is 1, so the sum need not be divided."""
        return _normalized(self._sum)


POOLS: dict[str, type[LastToken | Mean]] = {"last": LastToken, "first": FirstToken, "mean": Mean}


def make_pool(kind: str) -> Pool | None:
    """Return a pool for one sequence of a model with this pooling; None for "none"."""
    return cast("Pool", POOLS[kind]()) if kind in POOLS else None


def _normalized(vector: Float64) -> bytes | None:
    length = float(np.sqrt(np.sum(vector * vector)))
    if not np.isfinite(length) or length == 0.0:
        return None
    return (vector / length).astype("<f4").tobytes()
