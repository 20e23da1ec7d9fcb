"""Pooler: makes one embedding, or one score, of the vectors of the tokens of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Pooler(Protocol):
    """Collects the vectors of one sequence, in the order of its tokens; see runtime/pooling.py."""

    reads_prefixes: bool
    """Whether tokens whose keys are cached need not be computed."""

    def positions(self, start: int, end: int, length: int) -> range:
        """Which of the tokens start .. end - 1 of a sequence of `length` tokens it needs."""

    def add(self, vectors: Sequence[object]) -> None:
        """Take the vectors of the next of these tokens, if there are any."""

    def result(self) -> bytes | None:
        """Return the embedding, fp32 of length 1, or the score; None if it is not finite."""
