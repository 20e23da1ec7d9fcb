"""TowerTurns: in which order the media items of several callers are encoded.

One tower runs at a time. In the order of arrival, an item would wait for the items of all requests
of another caller. Whose items have had the least work is next, as in core/turns.py; here an item
can have several callers, because equal items are encoded once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

# About this many callers without items are remembered before all of them are forgotten.
_IDLE_CALLERS = 64


class TowerTurns:
    """The work that was done for each caller, and when it had its last turn."""

    def __init__(self) -> None:
        self._turns: dict[str, tuple[int, int]] = {}  # (work, the number of its last turn)
        self._num_turns = 0

    def came(self, caller: str, waiting: Iterable[str]) -> None:
        """Count a caller that had no item: it is owed nothing for the time before.

        waiting: the callers that have items.
        """
        others = set(waiting)
        if len(self._turns) > 2 * len(others) + _IDLE_CALLERS:
            self._turns = {name: self._turns[name] for name in others}
        known = [self._turns[name][0] for name in others]
        work, last = self._turns.get(caller, (0, 0))
        self._turns[caller] = max(work, min(known, default=work)), last

    def encoded(self, caller: str, work: int) -> None:
        """Count an item of this caller."""
        self._num_turns += 1
        self._turns[caller] = self._turns[caller][0] + work, self._num_turns

    def order(self, items: Iterable[tuple[T, int, Iterable[str]]]) -> Iterator[T]:
        """Yield items in turns of their callers.

        items: each with its work and its callers, in the order of arrival.
        """
        lines: dict[str, list[tuple[T, int]]] = {}
        for item, work, callers in items:
            for caller in callers:
                lines.setdefault(caller, []).append((item, work))
        turns = {caller: self._turns[caller] for caller in lines}
        places, passed_over = dict.fromkeys(lines, 0), set()
        number = self._num_turns
        while turns:
            caller = min(turns, key=turns.__getitem__)
            item, work = lines[caller][places[caller]]
            places[caller] += 1
            number += 1
            turns[caller] = turns[caller][0] + work, number
            if places[caller] == len(lines[caller]):
                del turns[caller]
            if id(item) not in passed_over:
                passed_over.add(id(item))
                yield item
