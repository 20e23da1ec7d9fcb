"""Pooler: computes one embedding, or one score, from the vectors of a sequence's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Pooler(Protocol):
    """Collects the vectors of one sequence, in the order of its tokens; see runtime/pooling.py."""

    reads_prefixes: bool
    """Whether tokens need not be computed if the prefix cache has their keys."""

    def positions(self, start: int, end: int, length: int) -> range:
        """Return the positions in start .. end - 1 with a vector that the result needs.

        length: the number of tokens of the sequence.
        """

    def add(self, vectors: Sequence[object]) -> None:
        """Add the vectors of the next tokens of `positions`; `vectors` may be empty."""

    def result(self) -> bytes | None:
        """Return the result in fp32: an embedding, a score or logits, or a row for each token.

        The result is scaled to norm 1 if the head of the model asks for this
        (Head.unit). None: a value is not finite, or a vector that should be scaled is all zeros.
        """
