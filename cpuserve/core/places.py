"""CallerPlaces: a fixed number of places for work; no caller can take all of them."""

from __future__ import annotations

from collections import Counter
from typing import Generic, TypeVar

from cpuserve.core.turns import CallerTurns

T = TypeVar("T")


class CallerPlaces(Generic[T]):
    """Items of callers that wait for one of `count` places, in turns; for one thread at a time.

    A caller gets a further place only if more are free than it has. So one caller has half of the
    places at most, and the last free one waits for a caller that has none, however long the items
    of the others stay.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._turns: CallerTurns[T] = CallerTurns()
        self._held: Counter[str] = Counter()

    def put(self, caller: str, item: T, work: float) -> None:
        """Let an item wait for a place. work: how much work it is, in any unit."""
        self._turns.put(caller, item, work)

    def __len__(self) -> int:
        return len(self._turns)

    @property
    def num_callers(self) -> int:
        """Number of callers with items that wait."""
        return self._turns.num_callers

    def waiting(self, caller: str) -> int:
        """Return how many items of a caller wait."""
        return self._turns.count(caller)

    def take(self) -> tuple[str, T] | None:
        """Give the next item a place until `leave`, and return it with its caller.

        None = no item waits, or their callers may have no further place now.
        """
        free = self.count - self._held.total()
        if not free or not self._turns:
            return None
        for caller, _ in self._turns.firsts():
            if self._held[caller] < free:
                self._held[caller] += 1
                return self._turns.take(caller)
        return None

    def leave(self, caller: str) -> None:
        """Free a place of a caller."""
        self._held[caller] -= 1
        if not self._held[caller]:
            del self._held[caller]

    def charge(self, caller: str, work: float) -> None:
        """Count work that was not known before an item was done."""
        self._turns.charge(caller, work)

    def remove(self, item: T) -> bool:
        """Remove an item that waits; False if it does not wait (any more)."""
        return self._turns.remove(item)
