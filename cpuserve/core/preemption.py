"""Choose the requests that are preempted, so that no caller's requests keep all slots or blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from cpuserve.base.ids import BlockId
from cpuserve.core.kv.manager import KvManager
from cpuserve.core.queue import Policy
from cpuserve.core.request import Request


def users(running: Sequence[Request], blocks: set[BlockId], block_size: int) -> list[Request]:
    """Return the requests that begin after tokens in these blocks, which no step has computed.

    They found the blocks in the prefix cache.
    """
    return [r for r in running if r.uses(blocks, r.num_computed // block_size)]


def to_free_a_block(running: Sequence[Request], kv: KvManager, policy: Policy) -> Request:
    """Return the request to preempt if no block is free.

    It is the last request of the caller that holds the most blocks, among the requests
    of the lowest priority. The first request of `running` always advances.
    """
    last, others = running[-1], running[1:]
    if policy == "priority":
        others = [r for r in others if r.priority == last.priority]
    return _of_largest(others, running, kv) or last


def to_start(
    head: Request, running: Sequence[Request], kv: KvManager, policy: Policy, slots: int
) -> list[Request]:
    """Return the requests to preempt for `head`, if its caller has nothing running.

    Every other caller keeps at least one running request. The list is empty
    if that frees too few slots or blocks, or if `head` needs more than its share of the blocks.

    slots: number of free slots.
    """
    left, found = list(running), list[Request]()
    needs, free = kv.needs(len(head.token_ids)), kv.num_free
    num_callers = 1 + len({request.params.caller for request in running})
    while True:
        lacks_blocks = free < needs + kv.num_groups * len(left)
        if slots and not lacks_blocks:
            return found
        if lacks_blocks and needs > kv.num_blocks // num_callers:
            return []
        num_running = Counter(request.params.caller for request in left)
        able = [r for r in left if num_running[r.params.caller] > 1]
        if policy == "priority":
            able = [r for r in able if r.priority >= head.priority]
        victim = _of_largest(able, left, kv if slots else None)
        if victim is None:
            return []
        found.append(victim)
        left.remove(victim)
        slots, free = slots + 1, free + kv.num_held(victim.tables)


def victims(
    head: Request,
    running: Sequence[Request],
    kv: KvManager,
    policy: Policy,
    slots: int,
    *,
    runs: bool,
) -> list[Request]:
    """Return requests of lower priority, or of callers with several if `head` has none.

    slots: number of free slots. runs: whether the caller of `head` has a running request.
    """
    found = of_lower_priority(head, running, kv) if policy == "priority" else []
    return found if found or runs else to_start(head, running, kv, policy, slots)


def of_lower_priority(head: Request, running: Sequence[Request], kv: KvManager) -> list[Request]:
    """Return the requests of lower priority than `head`, the last first, if it can start then."""
    below = [r for r in running if head.rank < r.rank and head.priority < r.priority]
    free = kv.num_free + sum(kv.num_held(r.tables) for r in below)
    spare = kv.num_groups * (len(running) - len(below))
    if free < kv.needs(len(head.token_ids)) + spare:
        return []
    found: list[Request] = []
    while below and running[-1 - len(found)] is below[-1]:
        found.append(below.pop())
    return found


def _of_largest(
    able: Sequence[Request], running: Sequence[Request], kv: KvManager | None
) -> Request | None:
    """Return the last of `able` that belongs to the caller with the most of `running`.

    kv: the caller with the most blocks is meant; None = with the most requests.
    """
    able_callers = {request.params.caller for request in able}
    if len(able_callers) < 2:
        return able[-1] if able else None
    held: Counter[str] = Counter()
    for request in running:
        held[request.params.caller] += 1 if kv is None else kv.num_held(request.tables)
    most = max(held[caller] for caller in able_callers)
    return next(r for r in reversed(able) if held[r.params.caller] == most)
