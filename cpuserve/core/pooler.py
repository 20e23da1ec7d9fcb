"""Pooler: makes one embedding, or one score, of the vectors of the tokens of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Pooler(Protocol):
    """Collects the vectors of one sequence, in the order of its tokens; see runtime/pooling.py."""

    reads_prefixes: bool
    """Whether tokens whose keys are cached need not be computed."""

    def positions(self, start: int, end: int, length: int) -> range:
        """Return the positions in start .. end - 1 with vectors that it needs.

        length: the number of tokens of the sequence.
        """

    def add(self, vectors: Sequence[object]) -> None:
        """Add the vectors of the next tokens of `positions`; there may be none."""

    def result(self) -> bytes | None:
        """Return the embedding (fp32, with norm 1) or the score; None if it is not finite."""
