"""MinuteWindow: how much was counted in the last minute."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

_MINUTE = 60


class MinuteWindow:
    """Sums amounts of the last minute, in memory that does not depend on their number.

    Amounts are kept by whole seconds. A second is dropped when its last moment is a minute ago,
    so that no minute has more than the sums allow; an amount stays for 60 to 61 seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: deque[list[int]] = deque()  # [second, amount], oldest first
        self._total = 0

    def add(self, amount: int) -> None:
        """Count an amount now."""
        second = int(self._clock())
        if not self._seconds or self._seconds[-1][0] != second:
            self._drop_old()
            self._seconds.append([second, 0])
        self._seconds[-1][1] += amount
        self._total += amount

    def total(self) -> int:
        """Return the sum of the last minute."""
        self._drop_old()
        return self._total

    def free_in(self, amount: int) -> float:
        """Return the seconds until `amount` of the sum is older than a minute."""
        now, left = self._clock(), amount
        end = now
        for second, counted in self._seconds:
            if left <= 0:
                break
            left -= counted
            end = float(second + 1 + _MINUTE)
        return max(0.0, end - now)

    def empty_in(self) -> float:
        """Return the seconds until all of the sum is older than a minute."""
        return self.free_in(self.total())

    def _drop_old(self) -> None:
        now = self._clock()
        while self._seconds and now >= self._seconds[0][0] + 1 + _MINUTE:
            self._total -= self._seconds.popleft()[1]
