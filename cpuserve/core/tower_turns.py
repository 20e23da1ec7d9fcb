"""TowerTurns: in which order the pictures of several callers are encoded.

There is one tower. In the order of arrival, a picture would wait for the pictures of all requests
of another caller. Whose pictures have had the least patches encoded is next, as in core/turns.py;
here a picture can have several callers, because equal pictures are encoded once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

# About this many callers without pictures are remembered before all of them are forgotten.
_IDLE_CALLERS = 64


class TowerTurns:
    """The patches that were encoded for each caller, and when it had its last turn."""

    def __init__(self) -> None:
        self._turns: dict[str, tuple[int, int]] = {}  # (patches, the number of its last turn)
        self._num_turns = 0

    def came(self, caller: str, waiting: Iterable[str]) -> None:
        """Count a caller that had no picture: it is owed nothing for the time before.

        waiting: the callers that have pictures.
        """
        others = set(waiting)
        if len(self._turns) > 2 * len(others) + _IDLE_CALLERS:
            self._turns = {name: self._turns[name] for name in others}
        known = [self._turns[name][0] for name in others]
        patches, last = self._turns.get(caller, (0, 0))
        self._turns[caller] = max(patches, min(known, default=patches)), last

    def encoded(self, caller: str, patches: int) -> None:
        """Count a picture of this caller."""
        self._num_turns += 1
        self._turns[caller] = self._turns[caller][0] + patches, self._num_turns

    def order(self, pictures: Iterable[tuple[T, int, Iterable[str]]]) -> Iterator[T]:
        """Yield pictures in turns of their callers.

        pictures: each with its patches and its callers, in the order of arrival.
        """
        lines: dict[str, list[tuple[T, int]]] = {}
        for picture, patches, callers in pictures:
            for caller in callers:
                lines.setdefault(caller, []).append((picture, patches))
        turns = {caller: self._turns[caller] for caller in lines}
        places, passed = dict.fromkeys(lines, 0), set()
        number = self._num_turns
        while turns:
            caller = min(turns, key=turns.__getitem__)
            picture, patches = lines[caller][places[caller]]
            places[caller] += 1
            number += 1
            turns[caller] = turns[caller][0] + patches, number
            if places[caller] == len(lines[caller]):
                del turns[caller]
            if id(picture) not in passed:
                passed.add(id(picture))
                yield picture
