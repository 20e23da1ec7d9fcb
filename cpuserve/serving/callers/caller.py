"""Caller: who sends a request, with the limits that the operator has set."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cpuserve.serving.callers.minute_window import MinuteWindow

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
