"""A caller with much long work leaves a thread of each kind to callers that have none."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from cpuserve.base.errors import TooManyRequests
from cpuserve.core.places import CallerPlaces
from cpuserve.media.sources import SourceRules
from cpuserve.serving import threads
from cpuserve.serving.callers.slots import TurnSlots
from cpuserve.serving.media import reader
from cpuserve.serving.threads import WORKS_FOR, TurnThreads
from tests.helpers.patience import PATIENCE_S, until

POOLS = {
    pool.name: pool
    for module in (threads, reader)
    for pool in vars(module).values()
    if isinstance(pool, TurnThreads)
}


def started(pool: TurnThreads, caller: str, work: Any) -> asyncio.Task[Any]:
    async def run() -> Any:
        WORKS_FOR.set(caller)
        return await pool.run(1, work)

    return asyncio.create_task(run())


@pytest.mark.parametrize("name", [name for name, pool in POOLS.items() if pool.count > 1])
def test_work_of_a_modest_caller_begins_while_that_of_a_greedy_one_goes_on(name: str) -> None:
    pool, gate, begun = POOLS[name], threading.Event(), []

    def work(caller: str) -> bool:
        begun.append(caller)
        return caller == "modest" or gate.wait(PATIENCE_S)

    async def main() -> None:
        many = [started(pool, "greedy", lambda: work("greedy")) for _ in range(2 * pool.count)]
        try:
            await until(lambda: len(begun) == (pool.count + 1) // 2)
            assert await started(pool, "modest", lambda: work("modest"))
            assert begun.count("greedy") == (pool.count + 1) // 2
            assert not any(task.done() for task in many)
        finally:
            gate.set()
        assert all(await asyncio.gather(*many))

    asyncio.run(main())


def test_the_kinds_with_one_thread_have_only_work_that_computes() -> None:
    assert [name for name, pool in POOLS.items() if pool.count == 1] == ["cpuserve-decode"]


def test_several_greedy_callers_leave_a_thread_to_one_more() -> None:
    places: CallerPlaces[int] = CallerPlaces(8)
    for caller in "abc":
        for number in range(9):
            places.put(caller, number, 1.0)
    held = []
    while (taken := places.take()) is not None:
        held.append(taken[0])
    assert len(held) < 8
    places.put("d", 0, 1.0)
    assert places.take() == ("d", 0)
    assert places.take() is None
    for caller in held:
        places.leave(caller)
    assert places.take() is not None


def test_items_get_the_places_of_those_that_leave_in_turns() -> None:
    places: CallerPlaces[int] = CallerPlaces(3)
    for number in range(4):
        places.put("a", number, 1.0)
    places.put("b", 7, 1.0)
    assert [places.take() for _ in range(3)] == [("a", 0), ("b", 7), None]
    places.leave("b")
    assert [places.take() for _ in range(2)] == [("a", 1), None]
    assert places.remove(2)
    assert not places.remove(1)
    places.leave("a")
    assert places.take() == ("a", 3)
    assert places.waiting("a") == 0


def test_the_waiting_work_of_one_caller_is_bounded_and_that_of_others_is_not() -> None:
    pool, gate = TurnThreads(2, "test", most_waiting=3), threading.Event()

    async def main() -> None:
        many = [started(pool, "greedy", lambda: gate.wait(PATIENCE_S)) for _ in range(4)]
        await asyncio.sleep(0)
        with pytest.raises(TooManyRequests, match="3 other requests of this client wait"):
            await started(pool, "greedy", lambda: 1)
        assert await started(pool, "modest", lambda: 1) == 1
        many.pop().cancel()
        await asyncio.sleep(0)
        many.append(started(pool, "greedy", lambda: True))
        gate.set()
        assert all(await asyncio.gather(*many))

    asyncio.run(main())


def test_a_refused_thread_is_an_error_of_its_work_only(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = TurnThreads(1, "test")

    def refuse(*_: object) -> None:
        msg = "can't start new thread"
        raise RuntimeError(msg)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="start new thread"):
                asyncio.run(pool.run(1, lambda: 1))
    assert asyncio.run(pool.run(1, lambda: 7)) == 7


def test_a_task_that_is_cancelled_gives_back_its_slot_or_its_place_in_the_line() -> None:
    slots, running, gate = TurnSlots(2), [], asyncio.Event()

    async def work(caller: str) -> None:
        async with slots.slot(caller):
            running.append(caller)
            await gate.wait()

    async def main() -> None:
        tasks = [asyncio.create_task(work(caller)) for caller in ("a", "a", "b", "c", "c")]
        await asyncio.sleep(0)
        assert running == ["a", "b"]
        tasks[3].cancel()
        tasks[0].cancel()
        await asyncio.sleep(0)
        await until(lambda: len(running) == 3)
        gate.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert running[:2] == ["a", "b"]
        assert sorted(running[2:]) == ["a", "c"]
        assert [task.cancelled() for task in tasks] == [True, False, False, True, False]
        await asyncio.wait_for(work("d"), PATIENCE_S)

    asyncio.run(main())


def test_the_time_of_a_fetch_begins_with_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of another caller that a resolver keeps hold threads, and the client waits for one."""
    pool, gate, events, real = TurnThreads(1, "test"), threading.Event(), [], asyncio.wait_for

    def read(_url: str, _sources: object) -> bytes:
        events.append("fetched")
        return b"picture"

    async def timed(work: Any, timeout: float) -> Any:
        events.append("timed")
        return await real(work, timeout)

    monkeypatch.setattr(reader, "_FETCHING", pool)
    monkeypatch.setattr(reader, "read_source", read)
    monkeypatch.setattr(asyncio, "wait_for", timed)
    sources = SourceRules(timeout_s=PATIENCE_S)

    async def main() -> None:
        slow = started(pool, "greedy", lambda: gate.wait(PATIENCE_S))
        good = asyncio.create_task(reader._fetched("http://good.example/a.png", sources))
        await until(lambda: pool._places.waiting("") == 1)
        for _ in range(9):
            await asyncio.sleep(0)
        assert events == []
        gate.set()
        assert await good == b"picture"
        assert sorted(events) == ["fetched", "timed"]
        assert await slow

    asyncio.run(main())
