"""WaitingQueue: requests that do not run yet, in order; PromptOrder: the prompts of a step."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush, merge
from itertools import islice
from typing import Literal

from cpuserve.core.budget import SHARE_BESIDE_FRESH, PromptBudget, only_decisions
from cpuserve.core.callers import CallerShares, Place
from cpuserve.core.kv.manager import KvManager
from cpuserve.core.request import Request

Policy = Literal["fcfs", "priority"]
QueueRank = tuple[float, int]

AGING_S = 30.0
# A step searches this many waiting requests for a short prompt, so that long queues stay cheap.
LOOK_AHEAD = 32
# The ranks of requests that continue a response, and of all others, with the policy "fcfs".
_GOES_ON, _BEGINS = 0.0, 1.0


def rank_of(request: Request, policy: Policy) -> QueueRank:
    """Return the sort key of a request: the smallest key goes first, and no two keys are equal.

    With the policy "fcfs", requests are sorted by arrival. Requests that continue a response
    come first, because their clients wait for its next token.

    With "priority", a request of priority p > 0 is treated as if it had arrived later
    by 30 s x log2(1 + p) (p = 1: 30 s, 3: 60 s, 7: 90 s), and a request of priority p < 0 as if
    it had arrived earlier by the same time. A request that has waited for half an hour therefore
    overtakes new requests of any priority. The rank of a request never changes.
    """
    if policy == "fcfs":
        return _GOES_ON if request.continues else _BEGINS, request.order
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


def candidates(
    waiting: Iterable[Request], slots: int, kv: KvManager, running: int
) -> list[Request]:
    """Return requests that may start without the blocks that earlier waiting requests need.

    slots: how many requests can start. running: how many run; each may need a block.
    """
    found: list[Request] = []
    free = kv.num_free - kv.num_groups * running
    for request in next_requests(waiting, slots):
        free -= kv.needs(len(request.token_ids)) + kv.num_groups
        if free < 0 and found:
            break
        found.append(request)
        if free < 0:  # the first request may still fit, if it finds blocks in the prefix cache
            break
    return found


class WaitingQueue:
    """Waiting requests by priority, by the shares of their callers, and by rank.

    The requests of one caller are sorted by rank, so a preempted request returns to its old place.
    Requests of equal priority start so that their callers get equal shares:
    first callers with nothing running, then the caller with the least work (callers.py).

    work_of: returns how many tokens of a waiting request have to run.
    """

    def __init__(
        self, callers: CallerShares, policy: Policy, work_of: Callable[[Request], int]
    ) -> None:
        self._callers = callers
        self._policy = policy
        self._work_of = work_of
        self._levels: dict[float, _Level] = {}

    def __bool__(self) -> bool:
        return bool(self._levels)  # a level without requests is removed

    def __len__(self) -> int:
        return sum(len(level.ranks) for level in self._levels.values())

    def __iter__(self) -> Iterator[Request]:
        if len(self._levels) == 1:
            return self._in_order(*self._levels.values())
        return self._merged()

    def __contains__(self, request: Request) -> bool:
        level = self._levels.get(self._level_of(request))
        return level is not None and request in level

    def held_back(self, most: int) -> Iterator[Request]:
        """Yield the requests that the whole queue holds back (Wait.mark), in any order.

        most: how many of a caller and a priority are yielded, the earliest ones.
        """
        for level in self._levels.values():
            for requests in level.of.values():
                yield from islice((r for r in requests if r.wait.mark is not None), most)

    def push(self, request: Request) -> None:
        """Insert `request` at its place."""
        self._levels.setdefault(self._level_of(request), _Level()).push(request)

    def remove(self, request: Request) -> None:
        """Remove `request`."""
        name = self._level_of(request)
        self._levels[name].remove(request)
        if not self._levels[name].ranks:
            del self._levels[name]

    def _level_of(self, request: Request) -> float:
        return request.rank[0] if self._policy == "fcfs" else float(request.priority)

    def _merged(self) -> Iterator[Request]:
        """Yield the requests of all levels: each of a level takes the next rank of its level."""
        levels = [zip(x.ranks, self._in_order(x), strict=True) for x in self._levels.values()]
        return (request for _, request in merge(*levels, key=lambda pair: pair[0]))

    def _in_order(self, level: _Level) -> Iterator[Request]:
        """Yield the requests of a level, as if each one had started when it is yielded."""
        if len(level.of) == 1:
            return iter(*level.of.values())
        return self._in_turn(level)

    def _in_turn(self, level: _Level) -> Iterator[Request]:
        places = [(self._callers.waiting_place(name), own) for name, own in level.of.items()]
        heads = [(*place, own[0].rank, 0, own) for place, own in places]
        heapify(heads)
        while heads:
            _, work, _, at, own = heappop(heads)
            yield own[at]
            if at + 1 < len(own):
                work += self._work_of(own[at])
                heappush(heads, (True, work, own[at + 1].rank, at + 1, own))


class _Level:
    """The waiting requests of one priority.

    ranks: the ranks of all its requests, sorted. of: the requests of each caller, by rank.
    """

    def __init__(self) -> None:
        self.ranks: list[QueueRank] = []
        self.of: dict[str, list[Request]] = {}

    def __contains__(self, request: Request) -> bool:
        own = self.of.get(request.params.caller, [])
        at = bisect_left(own, request.rank, key=by_rank)
        return at < len(own) and own[at] is request

    def push(self, request: Request) -> None:
        insort(self.ranks, request.rank)
        insort(self.of.setdefault(request.params.caller, []), request, key=by_rank)

    def remove(self, request: Request) -> None:
        assert request in self, f"request {request.id} is not in the queue"
        own = self.of[request.params.caller]
        del own[bisect_left(own, request.rank, key=by_rank)]
        del self.ranks[bisect_left(self.ranks, request.rank)]
        if not own:
            del self.of[request.params.caller]


class PromptOrder:
    """Sorts prompts by priority, by the shares of their callers, and by their remaining tokens."""

    def __init__(self, kv: KvManager, callers: CallerShares, policy: Policy) -> None:
        self._kv = kv
        self._callers = callers
        self._policy = policy

    def tokens_left(self, request: Request) -> int:
        """Return how many tokens of `request` have to run, besides those in the prefix cache."""
        num_tokens = len(request.token_ids)
        if request.is_running:
            return num_tokens - request.num_computed
        if not request.reads_prefixes:
            return num_tokens
        return num_tokens - self._kv.num_cached_tokens(request.chain, request.token_ids)

    def in_order(self, prompts: Sequence[Request]) -> list[Request]:
        """Return the prompts as a step serves them, the first one first.

        Decisions are not sorted by length: a client waits for all of its questions.
        """
        if not only_decisions(prompts):
            return sorted(prompts, key=self._shortest_first)
        return self.whole(prompts)

    def whole(self, prompts: Sequence[Request]) -> list[Request]:
        """Return prompts in order if their lengths do not matter."""
        return sorted(prompts, key=self._first if self._policy == "fcfs" else by_rank)

    def _shortest_first(self, request: Request) -> tuple[int, Place, int, QueueRank]:
        priority = request.priority if self._policy == "priority" else 0
        return priority, self._callers.place(request), self.tokens_left(request), request.rank

    def _first(self, request: Request) -> tuple[Place, QueueRank]:
        return self._callers.place(request), request.rank

    def share(self, prompts: list[Request], oldest: Request, budget: PromptBudget) -> list[Request]:
        """Limit a step if there are several callers; return the prompts that get a part of it.

        prompts: as `in_order` has sorted them.

        A step without running streams would otherwise complete many prompts of a caller at a time,
        and the prompts of other callers, in this step or new ones, would wait for all of them.
        """
        fresh = [request for request in prompts if self._callers.is_fresh(request)]
        if fresh and oldest not in fresh:
            budget.oldest_share = SHARE_BESIDE_FRESH
        if not budget.ends_early or len(self._callers) < 2:
            return prompts
        if not fresh:
            budget.tokens = min(budget.tokens, budget.long)
            return prompts
        return [request for request in prompts if request in fresh or request is oldest]
