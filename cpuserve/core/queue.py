"""WaitingQueue: requests that do not run yet, sorted by rank."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Literal

from cpuserve.core.request import Request

Policy = Literal["fcfs", "priority"]
QueueRank = tuple[float, int]

AGING_S = 30.0
# A step searches this many waiting requests for a short prompt, so that long queues stay cheap.
LOOK_AHEAD = 32
# The queue remembers about this many callers without waiting requests before it forgets some.
_IDLE_CALLERS = 64
# The rank of requests that continue a response. It is less than the rank of the first turn, 1.
_GOES_ON = 0.0


def rank_of(request: Request, policy: Policy, turn: int = 0) -> QueueRank:
    """Return the sort key of a request: the smallest key goes first, and no two keys are equal.

    turn: WaitingQueue.turn_of the request's caller.

    With the policy "fcfs", requests are sorted by turn, then by arrival:
    with a single caller this is the order of arrival.
    Requests that continue a response come first, because their clients wait for its next token.

    With "priority", a request of priority p > 0 is treated as if it had arrived later
    by 30 s x log2(1 + p) (p = 1: 30 s, 3: 60 s, 7: 90 s), and a request of priority p < 0 as if
    it had arrived earlier by the same time. A request that has waited for half an hour therefore
    overtakes new requests of any priority. The rank of a request never changes.
    """
    if policy == "fcfs":
        return _GOES_ON if request.continues else float(turn), request.order
    levels = math.copysign(math.log2(1 + abs(request.priority)), request.priority)
    return request.arrival + AGING_S * levels, request.order


def by_rank(request: Request) -> QueueRank:
    """Return the sort key of a request."""
    return request.rank


def next_requests(waiting: Iterable[Request], slots: int) -> Iterator[Request]:
    """Yield the first waiting requests that a step may start: LOOK_AHEAD and all decisions.

    slots: how many requests can start. Decisions (Request.decides) are not counted,
    because a client waits for all questions of its request.
    """
    counted = 0
    for request in islice(waiting, slots):
        counted += not request.decides
        if counted > LOOK_AHEAD:
            return
        yield request


class WaitingQueue:
    """Waiting requests sorted by rank: a preempted request returns to its old place.

    The queue also numbers the turns of the callers.
    A request gets a later turn than the last request of its caller, and a later turn than all turns
    that are over. A caller with many waiting requests therefore delays the first request
    of another caller by one request only. A caller that pauses does not collect turns.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._last_turn: dict[str, int] = {}  # by caller: the turn of its last request
        self._turn = 0  # the latest turn with a request that has started

    def turn_of(self, caller: str) -> int:
        """Return the turn of the next request of this caller."""
        over = self._turn
        first = next((r.rank[0] for r in self._requests if r.rank[0] > _GOES_ON), None)
        if first is not None:
            # The turn of a waiting request is not over, even if a later request has started.
            over = min(over, int(first) - 1)
        if len(self._last_turn) > 2 * len(self._requests) + _IDLE_CALLERS:
            kept = {name: turn for name, turn in self._last_turn.items() if turn > over}
            self._last_turn = kept
        turn = 1 + max(over, self._last_turn.get(caller, 0))
        self._last_turn[caller] = turn
        return turn

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __contains__(self, request: Request) -> bool:
        at = bisect_left(self._requests, request.rank, key=by_rank)
        return at < len(self._requests) and self._requests[at] is request

    def push(self, request: Request) -> None:
        """Insert `request` at the place of its rank."""
        insort(self._requests, request, key=by_rank)

    def remove(self, request: Request) -> None:
        """Remove `request`."""
        at = bisect_left(self._requests, request.rank, key=by_rank)
        assert self._requests[at] is request, f"request {request.id} is not in the queue"
        self._turn = max(self._turn, int(request.rank[0]))
        del self._requests[at]
