"""Caller: who sends a request, with the limits that the operator has set."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

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


# How much a request changes the average time of a caller's requests.
_GAIN = 0.2


@dataclass(frozen=True, slots=True)
class CallerLimits:
    """The limits of a caller: requests and tokens a minute, and requests at the same time.

    Tokens are prompt tokens that are not cached, and generated tokens. None = no limit.
    """

    requests: int | None = None
    tokens: int | None = None
    parallel: int | None = None


NO_LIMITS = CallerLimits()


class CallerUse:
    """The requests and tokens of one caller, now and in the last minute, for the event loop.

    running: the number of requests that run.
    reserved: the tokens that running requests may still use.
    mean_s: the average time of a request in seconds; 0.0 = none has ended.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.running = 0
        self.reserved = 0
        self.mean_s = 0.0
        self.requests = MinuteWindow(clock)
        self.tokens = MinuteWindow(clock)

    def end(self, seconds: float) -> None:
        """Count a request that has ended after `seconds`."""
        self.running -= 1
        self.mean_s += (_GAIN if self.mean_s else 1.0) * (seconds - self.mean_s)

    def next_end_s(self) -> float:
        """Return the estimated seconds until one of the running requests ends, at least 1."""
        return min(60.0, max(1.0, self.mean_s / max(1, self.running)))


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request: an API key, a named caller of --api-key-file, or an address.

    name: its name in logs, metrics and queues; it has no characters that could forge a line.
    owner: the owner of files, batches and models that its requests store. It is not secret,
      and does not depend on the order of keys.
    priority: the lowest `priority` that its requests may have, and their usual one; a request with
      a lower number is scheduled earlier. None = requests choose any priority.
    private_cache: whether its prompts share no cached prefixes with prompts of other callers.
    use: its requests and tokens, which the limits bound; None = no limits.
      A reload of the file keeps it.
    """

    name: str
    owner: str
    priority: int | None = None
    private_cache: bool = False
    limits: CallerLimits = NO_LIMITS
    use: CallerUse | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of_address(cls, address: str) -> Caller:
        """Return the caller of a request without an API key, which has no limits."""
        return cls(address, address)
