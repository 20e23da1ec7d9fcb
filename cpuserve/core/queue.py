"""WaitingQueue: requests that have no slot yet, in the order of their rank."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Literal

from cpuserve.core.request import Request

Policy = Literal["fcfs", "priority"]
Rank = tuple[float, int]

AGING_S = 30.0


def rank_of(request: Request, policy: Policy) -> Rank:
    """Who goes first: the request with the smaller rank; no two are equal.

    "fcfs": order of arrival. "priority": priority 1 counts as having come 30 s later, 3 as 60 s,
    7 as 90 s, and so on by the logarithm (below 0: earlier). Waiting so makes up for any priority,
    from one end to the other in half an hour, without anything having to be sorted again.
    """
    if policy == "fcfs":
        return 0.0, request.order
    levels = math.copysign(math.log2(1 + abs(request.priority)), request.priority)
    return request.arrival + AGING_S * levels, request.order


def _rank(request: Request) -> Rank:
    return request.rank


class WaitingQueue:
    """Sorted by rank; a preempted request comes back to where it was."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __contains__(self, request: Request) -> bool:
        at = bisect_left(self._requests, request.rank, key=_rank)
        return at < len(self._requests) and self._requests[at] is request

    def push(self, request: Request) -> None:
        """Put `request` where its rank belongs."""
        insort(self._requests, request, key=_rank)

    def head(self) -> Request | None:
        """The request to admit next."""
        return self._requests[0] if self._requests else None

    def remove(self, request: Request) -> None:
        """Take `request` out."""
        at = bisect_left(self._requests, request.rank, key=_rank)
        assert self._requests[at] is request, f"request {request.id} does not wait"
        del self._requests[at]
