"""Pooling: combine the vectors of the tokens of a sequence into an embedding or a score."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt

from cpuserve.core.pooler import Pooler
from cpuserve.loader.dense_module import Head, Layer

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]


class LastToken:
    """Pools with the vector of the last token: in a decoder, only it attends to all others."""

    reads_prefixes = True

    def __init__(self, head: Head) -> None:
        self._head = head
        self._vector: Float64 = np.zeros(0)

    def positions(self, start: int, end: int, length: int) -> range:
        """Return the position of the last token."""
        return range(max(start, length - 1), end)

    def add(self, vectors: Sequence[object]) -> None:
        """Store the vector."""
        if vectors:
            self._vector = _applied(self._head.of_tokens, vectors[-1])

    def pooled(self) -> Float64:
        """Return the stored vector."""
        return self._vector

    def result(self) -> bytes | None:
        """Return the embedding or score of the stored vector; None if it is not finite."""
        return _finished(self.pooled(), self._head)


class FirstToken(LastToken):
    """Pools with the vector of the first token ("cls")."""

    reads_prefixes = False

    def positions(self, start: int, end: int, length: int) -> range:
        """Return the position of the first token."""
        del length
        return range(start, min(end, 1))


class EachToken:
    """Reads the vector of each token once. Subclasses define what happens to the vectors."""

    reads_prefixes = False

    def __init__(self, head: Head) -> None:
        self._head = head
        self._count = 0

    def positions(self, start: int, end: int, length: int) -> range:
        """Return the positions in [start, end) that were not added before a preemption."""
        del length
        return range(max(start, self._count), end)

    def add(self, vectors: Sequence[object]) -> None:
        """Process the vectors of the next tokens, and count them."""
        if vectors:
            self._take(vectors)
        self._count += len(vectors)

    def _take(self, vectors: Sequence[object]) -> None:
        """Process one or more vectors; `add` counts them afterwards."""
        raise NotImplementedError


class Mean(EachToken):
    """Pools with the mean of the vectors of all tokens.

    The vectors are added one after another,
    so the bits of the mean do not depend on how the prompt is divided into chunks.
    """

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        self._sum: Float64 = np.zeros(0)
        self._weight = 0

    def _take(self, vectors: Sequence[object]) -> None:
        rows, weights = _rows(self._head, vectors), self._weights(len(vectors))
        if weights is not None:
            rows = rows * weights[:, None]
        self._weight += len(vectors) if weights is None else int(weights.sum())
        if self._count:
            rows[0] += self._sum
        self._sum = np.add.reduce(rows, axis=0)  # numpy adds row after row along this axis

    def _weights(self, count: int) -> npt.NDArray[np.int64] | None:
        """Return the weights of the next `count` vectors; None = all are 1."""
        del count
        return None

    def pooled(self) -> Float64:
        """Return the mean."""
        return self._sum / max(self._weight, 1)

    def result(self) -> bytes | None:
        """Return the embedding or score of the mean of all vectors.

        A head that only scales the mean to length 1 gets the sum, which has the same direction.
        """
        scaled = self._head.unit and not self._head.layers
        return _finished(self._sum if scaled else self.pooled(), self._head)


class WeightedMean(Mean):
    """Pools with a mean that weights the vector of the n-th token with n."""

    def _weights(self, count: int) -> npt.NDArray[np.int64]:
        return np.arange(self._count + 1, self._count + count + 1)


class SqrtMean(Mean):
    """Pools with the sum of the vectors of all tokens, over the square root of their number."""

    def pooled(self) -> Float64:
        """Return this quotient."""
        return self._sum / math.sqrt(max(self._weight, 1))


class Largest(EachToken):
    """Pools with the largest value of all tokens in each column."""

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        self._largest: Float64 = np.zeros(0)

    def _take(self, vectors: Sequence[object]) -> None:
        largest = np.max(_rows(self._head, vectors), axis=0)
        self._largest = np.maximum(self._largest, largest) if self._count else largest

    def pooled(self) -> Float64:
        """Return the largest values."""
        return self._largest

    def result(self) -> bytes | None:
        """Return the embedding or score of the largest values; None if one is not finite."""
        return _finished(self.pooled(), self._head)


class LargestLogits(EachToken):
    """Makes a sparse embedding (SPLADE): log(1 + the largest value of all tokens) in each column.

    The vectors are logits over the vocabulary, all at least 0.
    If `head.logs` is 2, the logarithm is applied twice.
    """

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        self._largest: Float32 | None = None

    def _take(self, vectors: Sequence[object]) -> None:
        for vector in vectors:
            row = np.asarray(vector, np.float32)
            self._largest = row if self._largest is None else np.maximum(self._largest, row)

    def result(self) -> bytes | None:
        """Return the sparse embedding [vocab]; None if a value is not finite."""
        if self._largest is None or not np.all(np.isfinite(self._largest)):
            return None
        values = _logs_of(self._largest, self._head.logs)
        return _applied(self._head.layers, values).astype("<f4").tobytes()


class SummedLogits(EachToken):
    """Makes a sparse embedding (SPLADE): the sum of log(1 + x) of all tokens in each column.

    The vectors x are logits, as in LargestLogits. They are added one after another in fp64,
    so the bits of the sum do not depend on how the prompt is divided into chunks.
    """

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        self._sum: Float64 | None = None

    def _take(self, vectors: Sequence[object]) -> None:
        for vector in vectors:
            row = _logs_of(np.asarray(vector, np.float32), self._head.logs)
            self._sum = row.astype(np.float64) if self._sum is None else self._sum + row

    def result(self) -> bytes | None:
        """Return the sparse embedding [vocab]; None if a value is not finite."""
        if self._sum is None or not np.all(np.isfinite(self._sum)):
            return None
        return _applied(self._head.layers, self._sum).astype("<f4").tobytes()


def _logs_of(logits: Float32, times: int) -> Float32:
    for _ in range(times):
        logits = np.log1p(logits)
    return logits


class AllTokens(EachToken):
    """Collects the result of the head for each token, one after another."""

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        self._parts: list[bytes | None] = []

    def _take(self, vectors: Sequence[object]) -> None:
        self._parts += [_finished(row, self._head) for row in _rows(self._head, vectors)]

    def result(self) -> bytes | None:
        """Return the results of all tokens [tokens, width], fp32; None if one is not finite."""
        found = [part for part in self._parts if part is not None]
        return b"".join(found) if len(found) == len(self._parts) else None


class PoolerGroup:
    """Runs several poolers over the same vectors, and joins their results in order."""

    def __init__(self, poolers: list[Pooler]) -> None:
        self._poolers = poolers
        self.reads_prefixes = all(pooler.reads_prefixes for pooler in poolers)
        self._ranges: list[range] = []  # the positions that each pooler needs

    def positions(self, start: int, end: int, length: int) -> range:
        """Return the positions from the first one that any pooler needs to the last one."""
        self._ranges = [pooler.positions(start, end, length) for pooler in self._poolers]
        needed = [positions for positions in self._ranges if positions]
        if not needed:
            return range(end, end)
        return range(min(one.start for one in needed), max(one.stop for one in needed))

    def add(self, vectors: Sequence[object]) -> None:
        """Pass the vectors to each pooler that needs their positions."""
        first = min((positions.start for positions in self._ranges if positions), default=0)
        for pooler, positions in zip(self._poolers, self._ranges, strict=True):
            begin, end = positions.start - first, positions.stop - first
            pooler.add(vectors[begin:end] if positions else [])

    def result(self) -> bytes | None:
        """Return the results of the poolers, one after another; None if one is not finite."""
        results = [pooler.result() for pooler in self._poolers]
        found = [result for result in results if result is not None]
        return b"".join(found) if len(found) == len(results) else None


class ConcatenatedPools(PoolerGroup):
    """Pools in several ways; the head gets their results one after another as one vector."""

    def __init__(self, head: Head) -> None:
        parts = [cast("OneVector", POOLS[name](head)) for name in head.pooling.split("+")]
        super().__init__([*parts])
        self._parts, self._head = parts, head

    def result(self) -> bytes | None:
        """Return the embedding or score of all results; None if a value is not finite."""
        return _finished(np.concatenate([part.pooled() for part in self._parts]), self._head)


OneVector: TypeAlias = LastToken | Mean | Largest
POOLS: dict[str, type[LastToken | EachToken]] = {
    "last": LastToken,
    "first": FirstToken,
    "mean": Mean,
    "max": Largest,
    "weighted_mean": WeightedMean,
    "sqrt_mean": SqrtMean,
    "all": AllTokens,
    "splade": LargestLogits,
    "splade_sum": SummedLogits,
}


def make_pooler(head: Head, *, vectors: str = "") -> Pooler | None:
    """Return a pooler for one sequence of a model with `head`; None if the model generates text.

    vectors: the kinds of vectors that a request asks for, joined by "+" (SamplingParams.vectors).
      The head is not applied to vectors of tokens.
    """
    if head.pooling not in POOLS and "+" not in head.pooling:
        return None
    poolers = [_pooler_of(_head_of(head, kind)) for kind in vectors.split("+")]
    return poolers[0] if len(poolers) == 1 else PoolerGroup(poolers)


def _pooler_of(head: Head) -> Pooler:
    if "+" in head.pooling:
        return ConcatenatedPools(head)
    return cast("Pooler", POOLS[head.pooling](head))


def _head_of(head: Head, kind: str) -> Head:
    """Return the head that computes one kind of vectors."""
    if kind == "raw":
        return head.without_activation()
    if kind.endswith(("tokens", "weights", "multi")):
        last = {"weights": head.weights, "multi": head.multi}.get(kind.rpartition("_")[2])
        layers = () if last is None else (last,)
        of_token = Head("all", layers, kind.startswith("unit_"), of_tokens=head.of_tokens)
        return of_token.without_activation() if kind == "raw_weights" else of_token
    return replace(head, unit=False) if kind == "plain" else head


def _applied(layers: Sequence[Layer], vector: object) -> Float64:
    row = np.asarray(vector, np.float64)
    for layer in layers:
        row = layer(row)
    return row


def _rows(head: Head, vectors: Sequence[object]) -> Float64:
    """Return the vectors of tokens [tokens, width] after the layers for tokens."""
    rows = [_applied(head.of_tokens, vector) for vector in vectors] if head.of_tokens else vectors
    return np.asarray(rows, np.float64)


def _finished(vector: Float64, head: Head) -> bytes | None:
    vector = _applied(head.layers, vector)
    length = float(np.sqrt(np.sum(vector * vector)))
    if not np.isfinite(length) or (head.unit and length == 0.0):
        return None
    return (vector / length if head.unit else vector).astype("<f4").tobytes()
