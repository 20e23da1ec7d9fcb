"""Check that the scheduler's requests and their block tables agree; raise AssertionError if not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from cpuserve.base.ids import RequestId, SlotId
from cpuserve.core.kv.manager import KvManager, Tables
from cpuserve.core.kv.prefix import FORGOTTEN
from cpuserve.core.queue import by_rank
from cpuserve.core.request import Request


def check_requests(
    running: Sequence[Request], waiting: Sequence[Request], known: Iterable[RequestId]
) -> None:
    """Assert that each `known` request is in one list, and that the requests are in order.

    Running requests are sorted by rank, and so are the waiting requests of each caller and priority
    (with the policy "fcfs", requests of different priorities are sorted as well).
    """
    assert list(running) == sorted(running, key=by_rank), "the order is broken"
    for _, own in groupby(sorted(waiting, key=_sender), key=_sender):
        part = list(own)
        assert part == sorted(part, key=by_rank), "the order is broken"
    ids = {r.id for r in [*running, *waiting]}
    assert ids == set(known), "a request is lost"
    assert len(ids) == len(running) + len(waiting), "a request is in two places"
    assert all(not r.is_running and not any(r.tables) for r in waiting), "waiting holds blocks"
    assert all(r.ready for r in running), "a request runs that is not ready"
    assert all(r.num_computed < len(r.token_ids) for r in running), "a request stands still"


def _sender(request: Request) -> tuple[str, int]:
    return request.params.caller, request.priority


def check_slots(running: Iterable[Request], free: Iterable[SlotId], count: int) -> None:
    """Assert that each of `count` slots is free or has one running request."""
    slots = [*(r.slot for r in running), *free]
    assert sorted(slots) == list(range(count)), "slots leak"


def check_tables(running: Iterable[Request], kv: KvManager) -> None:
    """Assert that the block tables of `running` and the prefix index agree with `kv`."""
    tables: list[Tables] = []
    for request in running:
        least = min(map(len, request.tables))
        held = least * kv.block_size
        assert request.num_computed <= held, "computed tokens without blocks"
        chain = request.chain
        assert chain.num_entries <= least, "an entry without block"
        if chain.last is not None and not chain.last.forgotten:
            for table, block in zip(request.tables, chain.last.blocks, strict=True):
                own = table[chain.num_entries - 1]
                known = (block, kv.gone) if block != FORGOTTEN else (own,)
                assert own in known, "the chain has left the table"
        tables.append(request.tables)
    kv.check_invariants(tables)
