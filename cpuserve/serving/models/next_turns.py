"""Conversations, and the work that computes their next prompts while no request runs.

Many templates drop the thoughts of a response once the user writes again, or write its calls in
another way. All tokens after the first difference then have to be computed again. The next prompt
begins with the conversation as the template writes it then, and this beginning is known when the
response has ended. An idle engine computes it in advance (generation/next_turn.py).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from cpuserve.serving.calls.call import GenerateCall

# The most conversations, bytes of all their bodies, and bytes of one body.
MAX_TURNS = 64
MAX_BYTES = 1 << 25
MAX_BODY = 1 << 23
# Seconds without a request after which the engines count as idle. Clients that send
# their requests one after another leave shorter gaps, and should not wait for this work to end.
PAUSE_S = 0.2


@dataclass(slots=True, eq=False)
class TurnAhead:
    """A conversation with a response that has begun or ended.

    call: the call of the response, with its messages and tools.
    num_bytes: the size of the request's body.
    work: computes the next prompt of the conversation; None = the response has not ended.
    """

    call: GenerateCall
    num_bytes: int
    work: Callable[[], Awaitable[None]] | None = None

    def continues(self, other: TurnAhead) -> bool:
        """Whether this seems to be a later request of the conversation `other`.

        Only two messages are compared, because a conversation may have 100,000 of them.
        """
        now, before = self.call.messages or [], other.call.messages or []
        count = len(before)
        if self.call.caller != other.call.caller or not 0 < count < len(now):
            return False
        return now[0] == before[0] and now[count - 1] == before[-1]


class NextTurns:
    """Keeps the last conversations, and knows whether sequences of any model run or wait."""

    def __init__(self, pause_s: float = PAUSE_S) -> None:
        self._pause_s = pause_s
        self._turns: OrderedDict[int, TurnAhead] = OrderedDict()  # the oldest one first
        self._num_bytes = 0
        self._number = 0
        self._num_active = 0
        self._busy, self._idle, self._ready = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._turns)

    def count(self, change: int) -> None:
        """Add `change` to the number of sequences that run or wait."""
        self._num_active += change
        if self._num_active:
            self._busy.set()
            self._idle.clear()
        else:
            self._busy.clear()
            self._idle.set()

    def keep(self, turn: TurnAhead) -> int | None:
        """Keep a conversation as its response begins; return its number, None = it is too large.

        An earlier turn of the conversation is forgotten, and the oldest ones beyond the bounds.
        """
        if turn.num_bytes > MAX_BODY:
            return None
        for number, other in list(self._turns.items()):
            if turn.continues(other):
                self.forget(number)
        self._number += 1
        self._turns[self._number] = turn
        self._num_bytes += turn.num_bytes
        while len(self._turns) > MAX_TURNS or self._num_bytes > MAX_BYTES:
            self.forget(next(iter(self._turns)))
        return self._number

    def get(self, number: int) -> TurnAhead | None:
        """Return the conversation with this number, if it is still kept."""
        return self._turns.get(number)

    def answered(self, number: int, work: Callable[[], Awaitable[None]]) -> None:
        """Note that the response of a conversation has ended; `work` computes the next prompt."""
        turn = self._turns.get(number)
        if turn is not None:
            turn.work = work
            self._turns.move_to_end(number)
            self._ready.set()

    def forget(self, number: int) -> None:
        """Forget a conversation."""
        turn = self._turns.pop(number, None)
        if turn is not None:
            self._num_bytes -= turn.num_bytes

    def next(self) -> int | None:
        """Return the number of the conversation that has ended last, None if there is none."""
        ended = (number for number, turn in reversed(self._turns.items()) if turn.work is not None)
        return next(ended, None)

    async def wait_idle(self) -> int:
        """Wait until a response has ended and no request has run for a while; return its number."""
        while True:
            await self._ready.wait()
            await self._idle.wait()
            if await self.wait_busy(self._pause_s):
                continue
            if (number := self.next()) is not None:
                return number
            self._ready.clear()

    async def wait_busy(self, timeout_s: float | None = None) -> bool:
        """Wait until a sequence runs or waits; return False if none does within timeout_s."""
        # asyncio.wait_for could lose a cancellation that comes together with the event.
        waiting = asyncio.ensure_future(self._busy.wait())
        try:
            done, _ = await asyncio.wait((waiting,), timeout=timeout_s)
        finally:
            waiting.cancel()
        return bool(done)
