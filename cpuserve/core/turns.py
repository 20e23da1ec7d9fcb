"""CallerTurns: waiting items of several callers; whoever has had the least work is next.

This is the order of the queues before the scheduler: threads, bodies, lines of batches, grammars.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

# About this many callers without items are remembered before all of them are forgotten.
_IDLE_CALLERS = 64


@dataclass(slots=True)
class _Turn(Generic[T]):
    """The items of one caller with their work, the work done for it, and when it had its turn."""

    items: deque[tuple[float, T]] = field(default_factory=deque)
    work: float = 0.0
    last: int = 0


class CallerTurns(Generic[T]):
    """Items of each caller in the order of arrival; for one thread at a time.

    A caller that comes back continues with the least work of the callers that wait,
    so it neither passes them for long nor waits for all of their items.
    """

    def __init__(self) -> None:
        self._of: dict[str, _Turn[T]] = {}
        self._waiting: dict[str, _Turn[T]] = {}  # the callers with items
        self._num = 0
        self._num_turns = 0

    def __len__(self) -> int:
        return self._num

    @property
    def num_callers(self) -> int:
        """Number of callers with items."""
        return len(self._waiting)

    def count(self, caller: str) -> int:
        """Return how many items of a caller wait."""
        return len(self._of[caller].items) if caller in self._of else 0

    def put(self, caller: str, item: T, work: float) -> None:
        """Add an item. work: how much work it is, in any unit; see also `charge`."""
        if len(self._of) > 2 * len(self._waiting) + _IDLE_CALLERS:
            self._of = dict(self._waiting)
        turn = self._of.setdefault(caller, _Turn())
        if not turn.items:
            others = [other.work for other in self._waiting.values()]
            least = min(others) if others else max(other.work for other in self._of.values())
            turn.work = max(turn.work, least)
            self._waiting[caller] = turn
        turn.items.append((work, item))
        self._num += 1

    def first(self) -> T:
        """Return the next item. Raises ValueError if there is none."""
        return min(self._waiting.values(), key=_place).items[0][1]

    def firsts(self) -> list[tuple[str, T]]:
        """Return the callers with items, each with its next one, in the order of their turns."""
        turns = sorted(self._waiting.items(), key=lambda named: _place(named[1]))
        return [(caller, turn.items[0][1]) for caller, turn in turns]

    def take(self, caller: str | None = None) -> tuple[str, T]:
        """Remove the next item; return its caller and the item. Raises ValueError if none waits.

        caller: has this item; None = the caller that has had the least work.
        """
        if caller is None:
            caller = min(self._waiting, key=lambda name: _place(self._waiting[name]))
        turn = self._waiting[caller]
        work, item = turn.items.popleft()
        turn.work += work
        self._num_turns += 1
        turn.last = self._num_turns
        self._took(caller)
        return caller, item

    def charge(self, caller: str, work: float) -> None:
        """Count work that was not known before an item was done."""
        if caller in self._of:
            self._of[caller].work += work

    def remove(self, item: T) -> bool:
        """Remove an item before its turn; False if it does not wait."""
        for caller, turn in self._waiting.items():
            for entry in turn.items:
                if entry[1] is item:
                    turn.items.remove(entry)
                    self._took(caller)
                    return True
        return False

    def _took(self, caller: str) -> None:
        self._num -= 1
        if not self._of[caller].items:
            del self._waiting[caller]


def _place(turn: _Turn[T]) -> tuple[float, int]:
    return turn.work, turn.last
