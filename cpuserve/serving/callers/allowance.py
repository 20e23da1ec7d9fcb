"""Allowance: the part of its caller's limits that one request takes, reserved before it is used."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cpuserve.base.errors import TooManyRequests

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cpuserve.serving.callers.caller import Caller


@dataclass(frozen=True, slots=True)
class MinuteLimit:
    """A limit a minute: its size, the rest of it, and the seconds until all is left again."""

    limit: int
    left: int
    reset_s: float


class LimitReached(TooManyRequests):
    """A caller has reached one of its limits (429); the message says which, and when to return.

    limit: "requests", "tokens" or "parallel".
    """

    def __init__(self, message: str, limit: str, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.limit = limit


class Allowance:
    """The part of its caller's limits that one request takes, from `begin` to the end of its work.

    Everything is taken before it is used, in one piece of code that awaits nothing, so requests
    that arrive together cannot exceed a limit. A request starts while any tokens are left, and
    reserves all that it may use, even if less is left. So only the last request before a limit
    can exceed it, by its own tokens. The rest is given back at its end.
    """

    def __init__(self, caller: Caller) -> None:
        assert caller.use is not None
        self._name, self._limits, self._use = caller.name, caller.limits, caller.use
        self._begun: float | None = None
        self._takes_place = False
        self._ended = False
        self._reserved = 0
        self._has_tokens = False

    def begin(self, *, takes_place: bool = True) -> None:
        """Count the request. takes_place: whether it is one of the requests at the same time.

        Raises:
          LimitReached: the caller has as many requests as it may have; this one is not counted.
        """
        use, limits = self._use, self._limits
        if takes_place and limits.parallel is not None and use.running >= limits.parallel:
            what = f"{limits.parallel} requests at the same time"
            raise self._refusal(what, "parallel", use.next_end_s(), "when one has ended, in about")
        if limits.requests is not None and use.requests.total() >= limits.requests:
            excess = use.requests.total() - limits.requests + 1
            what = f"{limits.requests} requests a minute"
            raise self._refusal(what, "requests", use.requests.free_in(excess))
        use.requests.add(1)
        use.running += takes_place
        self._takes_place, self._begun = takes_place, use.clock()

    def end(self) -> None:
        """Give back all that the request has not used; repeated calls do nothing."""
        self._ended = True
        self._use.reserved -= self._reserved
        self._reserved = 0
        if self._begun is not None and self._takes_place:
            self._use.end(self._use.clock() - self._begun)
        self._begun = None

    @property
    def counts_tokens(self) -> bool:
        """Whether the caller has a limit of tokens."""
        return self._limits.tokens is not None

    def check_tokens(self) -> None:
        """Raise LimitReached if no tokens are left, unless this request has reserved some."""
        limit = self._limits.tokens
        if limit is None or self._has_tokens or self._left(limit) > 0:
            return
        use = self._use
        excess, counted = 1 - self._left(limit), use.tokens.total()
        # The wait for running requests is an estimate, and may be shorter or longer.
        waits = [use.tokens.free_in(excess)] if excess <= counted else []
        waits += [use.next_end_s()] if use.reserved else []
        what = f"{limit} tokens a minute"
        if use.reserved:
            what += f" (running requests have reserved {use.reserved})"
        raise self._refusal(what, "tokens", min(waits, default=1.0))

    def reserve(self, tokens: int) -> None:
        """Reserve the tokens that a part of the request may use.

        Raises:
          LimitReached: no tokens are left, and this is the first part of the request.
        """
        assert not self._ended, "nobody would give these tokens back"
        self.check_tokens()
        self._has_tokens = True
        self._reserved += tokens
        self._use.reserved += tokens

    def spend(self, tokens: int) -> None:
        """Count tokens that the request has used now, reserved or not."""
        taken = min(tokens, self._reserved)
        self._reserved -= taken
        self._use.reserved -= taken
        if tokens:
            self._use.tokens.add(tokens)

    def minute_limits(self) -> Mapping[str, MinuteLimit]:
        """Return the limits a minute as they are now, under "requests" and "tokens"."""
        use, limits = self._use, self._limits
        found: dict[str, MinuteLimit] = {}
        if limits.requests is not None:
            left = limits.requests - use.requests.total()
            found["requests"] = MinuteLimit(limits.requests, max(0, left), use.requests.empty_in())
        if limits.tokens is not None:
            left, reset_s = self._left(limits.tokens), use.tokens.empty_in()
            if use.reserved:
                reset_s = max(reset_s, use.next_end_s())
            found["tokens"] = MinuteLimit(limits.tokens, max(0, left), reset_s)
        return found

    def _left(self, limit: int) -> int:
        return limit - self._use.tokens.total() - self._use.reserved

    def _refusal(self, what: str, limit: str, wait_s: float, when: str = "in") -> LimitReached:
        seconds = max(1, math.ceil(wait_s))
        msg = f"Caller {self._name} has reached its limit of {what}: try again {when} {seconds} s"
        return LimitReached(msg, limit, seconds)
