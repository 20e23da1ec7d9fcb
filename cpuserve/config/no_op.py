"""NoOp: a flag, variable or argument of another server that has no effect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class NoOp:
    """A flag, variable or argument of another server that is accepted and has no effect.

    listed: each way of writing it, separated by spaces.
    takes: how many values the flag takes.
    why: the reason, as the end of a sentence in the note.
    only: the values without effect; other values are refused.
    """

    listed: str
    why: str
    takes: Literal["none", "one", "many"] = "one"
    only: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Each flag, variable or argument."""
        return tuple(self.listed.split())
