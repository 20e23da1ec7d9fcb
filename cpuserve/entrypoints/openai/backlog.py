"""Backlog: sequences that wait for their first token. Bounded, and it knows how long they wait."""

from __future__ import annotations

import time
from collections.abc import Callable

from cpuserve.errors import TooManyRequests

LONGEST_RETRY_S = 600.0
_GAIN = 0.1


class Backlog:
    """Counts sequences from their arrival to their first output.

    prompt_rate() is the engine's: prompt tokens a second, 0.0 while unknown.
    """

    def __init__(
        self,
        max_requests: int,
        max_tokens: int,
        prompt_rate: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.requests = 0
        self.tokens = 0
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._prompt_rate = prompt_rate
        self._clock = clock
        self._last_left: float | None = None
        self._gap_s = 0.0

    def enter(self, tokens: int) -> None:
        """A sequence with a prompt of `tokens` begins to wait."""
        if not self.requests:
            self._last_left = None
        self.requests += 1
        self.tokens += tokens

    def leave(self, tokens: int) -> None:
        """Its first output has come, or it is gone."""
        self.requests -= 1
        self.tokens -= tokens
        now, last = self._clock(), self._last_left
        if last is not None:
            gap = now - last
            self._gap_s += (_GAIN if self._gap_s else 1.0) * (gap - self._gap_s)
        self._last_left = now

    def wait_s(self) -> float:
        """How long a sequence that came now would wait for its first token, in seconds.

        The longer of two estimates: the prompts before it at the rate prompts are computed, and
        the sequences before it at the rate they have been leaving, which is what counts when all
        slots are taken by long answers.
        """
        rate = self._prompt_rate()
        computing = self.tokens / rate if rate > 0.0 else 0.0
        return max(computing, self.requests * self._gap_s)

    def check(self, requests: int, tokens: int, timeout_s: float | None = None) -> None:
        """TooManyRequests (429) if that many more may not wait, or would for more than timeout_s.

        An empty backlog takes anything.
        """
        if not self.requests:
            return
        for have, more, most, what in (
            (self.requests, requests, self._max_requests, "requests"),
            (self.tokens, tokens, self._max_tokens, "prompt tokens"),
        ):
            if have + more > most:
                msg = (
                    f"{have} {what} are waiting for their first token, this request has {more} "
                    f"more, and at most {most} may wait: try again later"
                )
                raise self._refusal(msg)
        if timeout_s is not None and (wait := self.wait_s()) > timeout_s:
            msg = (
                f"about {wait:.0f} s of work are waiting before this request, more than its "
                f"timeout of {timeout_s:g} s: try again later, or allow more time"
            )
            raise self._refusal(msg)

    def _refusal(self, message: str) -> TooManyRequests:
        wait = min(max(self.wait_s(), 1.0), LONGEST_RETRY_S)
        return TooManyRequests(message, retry_after_s=wait)
