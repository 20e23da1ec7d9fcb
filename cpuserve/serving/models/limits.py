"""Limits on the memory and time that one client, or all clients together, may use.

The backlog limits the sequences that wait for their first token, and estimates their wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from cpuserve.base.errors import TooManyRequests
from cpuserve.config.server import ServerOptions

# A prompt token takes 2 to 6 bytes of text in any language. In JSON it takes up to 64 bytes,
# when many short messages escape all non-ASCII characters. LEAST_BODY_BYTES allows for bodies
# with many prompts or long lists of token ids, which the context length does not bound.
BODY_BYTES_PER_TOKEN = 64
LEAST_BODY_BYTES = 4 << 20
LEAST_HELD_BYTES = 32 << 20


_DEFAULTS = ServerOptions()


def default_body_bytes(max_model_len: int) -> int:
    """Return the default limit on the bytes of a request body, for a context of max_model_len."""
    return max(LEAST_BODY_BYTES, BODY_BYTES_PER_TOKEN * max_model_len)


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Limits on the memory and time that one client, or all clients together, may use."""

    max_body_bytes: int = LEAST_BODY_BYTES
    body_timeout_s: float = 60.0
    # The most bytes of all request bodies together, until their prompts are tokenized, or twice as
    # many with the shares of other callers, and the most seconds that a body waits for its
    # reservation (BodyBudget). Bodies up to 64 KiB do not count.
    max_held_bytes: int = LEAST_HELD_BYTES
    body_wait_s: float = 10.0
    # The most admitted sequences that have not finished;
    # each takes a few KB here and in the engine. FrontEnd sets this limit
    # to the number of sequences that may wait plus the number that its engines can run.
    max_sequences: int = 2048
    # A stream's headers wait for its first token, so that an earlier error has its own status.
    # But proxies close connections that are silent for a minute,
    # and a long prompt can take that long: after this time the headers and a comment are sent.
    silent_s: float = _DEFAULTS.sse_ping_interval
    # The most sequences that may wait for their first token,
    # and the most prompt tokens of these sequences together (Backlog).
    max_queued_requests: int = _DEFAULTS.max_num_queued_reqs
    max_queued_tokens: int = _DEFAULTS.max_num_queued_tokens
    # The number of sequences that can run at the same time in all engines together.
    slots: int = 1
    # The longest time in seconds that a request may take, including its wait.
    # A request without a timeout gets this one.
    longest_s: float | None = None


LONGEST_RETRY_S = 600.0
_GAIN = 0.1
# The backlog averages the share of prompt tokens that are not in the prefix cache,
# over about _WINDOW_TOKENS tokens. The share starts at 1, with a weight of _PRIOR_TOKENS tokens.
_PRIOR_TOKENS, _WINDOW_TOKENS = 4096.0, 131072.0


class Backlog:
    """Counts sequences from their arrival to their first output.

    The limits apply to all callers together. A caller with less than its share
    (a limit divided by the number of callers) is admitted although others have filled the backlog,
    so the backlog may hold up to twice its limits. The caller "" (unknown) has no share.

    prompt_rate() returns how many prompt tokens the engine computes per second, 0.0 while unknown.
    slots: how many sequences can run at the same time.
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
        self._of: dict[str, tuple[int, int]] = {}  # caller: its waiting (requests, prompt tokens)
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._prompt_rate = prompt_rate
        self._clock = clock
        self._slots = slots
        # The next three attributes describe the time since the backlog was last empty.
        # `_since`: when the latest sequence started to run; while none has (`_started` is False),
        # when the first sequence began to wait. `_gap_s`: the moving average of the seconds
        # between two starts.
        self._since = 0.0
        self._started = False
        self._gap_s = 0.0
        # The prompt tokens of sequences that started lately, and how many of them were computed.
        self._asked = self._computed = _PRIOR_TOKENS

    def enter(self, tokens: int, caller: str = "") -> None:
        """Add a sequence; `tokens`: its prompt tokens that no other waiting sequence has added."""
        if not self.requests:
            # The backlog was empty, so the earlier pace of starts does not predict the next waits.
            self._since, self._started, self._gap_s = self._clock(), False, 0.0
        self._count(1, tokens, caller)

    def _count(self, requests: int, tokens: int, caller: str) -> None:
        self.requests += requests
        self.tokens += tokens
        if not caller:
            return
        before = self._of.get(caller, (0, 0))
        self._of[caller] = (before[0] + requests, before[1] + tokens)
        if not self._of[caller][0]:
            del self._of[caller]

    def start(self, tokens: int, computed: int, caller: str = "") -> None:
        """Remove a sequence at its first output; `computed`: prompt tokens not in the cache."""
        self.leave(tokens, caller)
        # Several waiting sequences may have the same prompt. The tokens count for one of them only:
        # `tokens` is 0 for the other sequences, although each computes a few prompt tokens again.
        self._learn_share(tokens, min(computed, tokens))
        now = self._clock()
        if self._started:
            gap = now - self._since
            self._gap_s += (_GAIN if self._gap_s else 1.0) * (gap - self._gap_s)
        self._since, self._started = now, True

    def leave(self, tokens: int, caller: str = "") -> None:
        """Remove a sequence that has no output; the measured pace of starts does not change."""
        self._count(-1, -tokens, caller)

    def has_share(self, caller: str) -> bool:
        """Return whether several callers wait, and this one has less than its share of both limits.

        The result is False for every caller if the backlog has reached twice its limits.
        """
        callers = len(self._of) + (caller not in self._of)
        requests, tokens = self._of.get(caller, (0, 0))
        return (
            bool(caller)
            and callers > 1
            and requests < self._max_requests // callers
            and tokens < self._max_tokens // callers
            and self.requests < 2 * self._max_requests
            and self.tokens < 2 * self._max_tokens
        )

    def _learn_share(self, asked: int, computed: int) -> None:
        self._asked += asked
        self._computed += computed
        if self._asked > _WINDOW_TOKENS:
            self._asked, self._computed = self._asked / 2, self._computed / 2

    def _before(self, caller: str) -> tuple[int, int]:
        """Return how many (sequences, prompt tokens) start before a new sequence of this caller.

        The engine serves callers in equal shares: before each of its own, one of every other.
        """
        if not caller:
            return self.requests, self.tokens
        callers = len(self._of) + (caller not in self._of)
        requests, tokens = self._of.get(caller, (0, 0))
        return min(self.requests, callers * requests), min(self.tokens, callers * tokens)

    def wait_s(self, caller: str = "") -> float:
        """Return the estimated time to first token of a sequence that arrives now, in seconds.

        caller: who sends it; "" = it starts after all others.

        The result is the largest of three estimates:
        1. The waiting prompt tokens that are probably not in the prefix cache,
           divided by the prompt rate.
        2. The number of waiting sequences times the average time between two starts.
           This estimate matters while long responses occupy all slots.
        3. The time since the last start, less estimate 1, times the number of rounds
           in which the waiting sequences start, `slots` in a round. This estimate matters
           while sequences that started together keep all slots, as they may end together.
        """
        waiting, waiting_tokens = self._before(caller)
        if not waiting:
            return 0.0
        rate = self._prompt_rate()
        tokens = waiting_tokens * self._computed / self._asked
        computing = tokens / rate if rate > 0.0 else 0.0
        silence = self._clock() - self._since - computing
        turns = -(-waiting // self._slots)
        return max(computing, waiting * self._gap_s, turns * silence)

    def check(self, timeout_s: float | None = None, caller: str = "") -> None:
        """Raise TooManyRequests (429) if the backlog is full or the wait would exceed timeout_s.

        A sequence is admitted while the backlog is below both limits, even if that sequence exceeds
        them: otherwise a sequence larger than the limits would be rejected while another one waits.
        """
        if not self.requests:
            return
        for have, most, what in (
            (self.requests, self._max_requests, "requests"),
            (self.tokens, self._max_tokens, "prompt tokens"),
        ):
            if have >= most and not self.has_share(caller):
                msg = (
                    f"The queue is full: {have} {what} are waiting for a first token, and the "
                    f"limit is {most}. Try again later"
                )
                raise self.refusal(msg)
        if timeout_s is not None and (wait := self.wait_s(caller)) > timeout_s:
            msg = (
                f"The estimated wait for the first token is {wait:.0f} s, which is longer than "
                f"this request's timeout of {timeout_s:g} s: try again later, or raise the timeout"
            )
            raise self.refusal(msg)

    def refusal(self, message: str) -> TooManyRequests:
        """Return a 429 error with the estimated wait as Retry-After, from 1 to 600 s."""
        wait = min(max(self.wait_s(), 1.0), LONGEST_RETRY_S)
        return TooManyRequests(message, retry_after_s=wait)
