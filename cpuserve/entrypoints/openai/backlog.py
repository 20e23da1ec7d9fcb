"""Backlog: sequences that wait for their first token. Bounded, and it knows how long they wait."""

from __future__ import annotations

import time
from collections.abc import Callable

from cpuserve.errors import TooManyRequests

LONGEST_RETRY_S = 600.0
_GAIN = 0.1
# What part of prompts is computed is learned over about so many tokens, from "all of them".
_PRIOR_TOKENS, _WINDOW_TOKENS = 4096.0, 131072.0


class Backlog:
    """Counts sequences from their arrival to their first output.

    prompt_rate() is the engine's: prompt tokens computed a second, 0.0 while unknown. slots: how
    many sequences may run at a time.
    """

    def __init__(
        self,
        max_requests: int,
        max_tokens: int,
        prompt_rate: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
        slots: int = 1,
    ) -> None:
        self.requests = 0
        self.tokens = 0
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._prompt_rate = prompt_rate
        self._clock = clock
        self._slots = slots
        # Since the backlog was last empty: when the last sequence began to run, and how long after
        # the one before it they did. `_since` is that last one, or else the first to wait.
        self._since = 0.0
        self._started = False
        self._gap_s = 0.0
        # Of the prompts that have been started lately: tokens, and how many had to be computed.
        self._asked = self._computed = _PRIOR_TOKENS

    def enter(self, tokens: int) -> None:
        """A sequence begins to wait; `tokens` of its prompt wait for no other sequence already."""
        if not self.requests:
            # Nobody waited, so the pace of before is not what the next ones will wait for.
            self._since, self._started, self._gap_s = self._clock(), False, 0.0
        self.requests += 1
        self.tokens += tokens

    def start(self, tokens: int, computed: int) -> None:
        """Its first output has come, after `computed` tokens of its prompt had to be computed."""
        self.leave(tokens)
        # Sequences that share a prompt wait with the first one's tokens, and compute its rest too.
        self._learn_share(tokens, min(computed, tokens))
        now = self._clock()
        if self._started:
            gap = now - self._since
            self._gap_s += (_GAIN if self._gap_s else 1.0) * (gap - self._gap_s)
        self._since, self._started = now, True

    def leave(self, tokens: int) -> None:
        """It is gone without an output, which says nothing of the pace at which others start."""
        self.requests -= 1
        self.tokens -= tokens

    def _learn_share(self, asked: int, computed: int) -> None:
        self._asked += asked
        self._computed += computed
        if self._asked > _WINDOW_TOKENS:
            self._asked, self._computed = self._asked / 2, self._computed / 2

    def wait_s(self) -> float:
        """How long a sequence that came now would wait for its first token, in seconds.

        The longer of two estimates: what the prefix cache is likely to leave of the prompts before
        it at the rate prompts are computed, and the sequences before it at the pace they have been
        starting, which is what counts when all slots are taken by long answers. Where none has
        started for longer than computing explains, that is how long it takes until they can: all
        slots may come free together, as they were taken.
        """
        if not self.requests:
            return 0.0
        rate = self._prompt_rate()
        tokens = self.tokens * self._computed / self._asked
        computing = tokens / rate if rate > 0.0 else 0.0
        silence = self._clock() - self._since - computing
        turns = -(-self.requests // self._slots)
        return max(computing, self.requests * self._gap_s, turns * silence)

    def check(self, timeout_s: float | None = None) -> None:
        """TooManyRequests (429) if no more may wait, or would for more than timeout_s.

        The last one that is let in may exceed the bounds: one that is larger than they are would
        else be told to come back for as long as anybody waits. An empty backlog takes anything.
        """
        if not self.requests:
            return
        for have, most, what in (
            (self.requests, self._max_requests, "requests"),
            (self.tokens, self._max_tokens, "prompt tokens"),
        ):
            if have >= most:
                msg = (
                    f"{have} {what} are waiting for their first token, and no more are taken from "
                    f"{most} on: try again later"
                )
                raise self.refusal(msg)
        if timeout_s is not None and (wait := self.wait_s()) > timeout_s:
            msg = (
                f"about {wait:.0f} s of work are waiting before this request, more than its "
                f"timeout of {timeout_s:g} s: try again later, or allow more time"
            )
            raise self.refusal(msg)

    def refusal(self, message: str) -> TooManyRequests:
        """A 429 with the time after which to come back, in seconds."""
        wait = min(max(self.wait_s(), 1.0), LONGEST_RETRY_S)
        return TooManyRequests(message, retry_after_s=wait)
