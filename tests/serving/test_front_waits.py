"""What a request waits for before it reaches the engine: threads, the loop, memory, a model."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest

from cpuserve.api.request.body_budget import BodyBudget
from cpuserve.serving import threads
from cpuserve.serving import work as works
from cpuserve.serving.threads import WORKS_FOR, TurnThreads, loop_turn
from cpuserve.serving.work import CURRENT_WORK, RequestWork
from tests.helpers.patience import PATIENCE_S, until
from tests.serving.test_registry import Machine, use

LONG_S = 0.05


def waited(run: Callable[[], Awaitable[object]], ends: Callable[[], Awaitable[None]]) -> set[str]:
    """Run a request, and `ends` after LONG_S beside it; return the causes of its waits."""
    work = RequestWork()

    async def request() -> None:
        CURRENT_WORK.set(work)
        WORKS_FOR.set("b")
        await run()

    async def main() -> None:
        task = asyncio.create_task(request())
        await asyncio.sleep(LONG_S)
        await ends()
        await asyncio.wait_for(task, PATIENCE_S)

    asyncio.run(main())
    return {cause for cause, seconds in work.waits.seconds().items() if seconds > 0}


def test_work_waits_for_a_thread() -> None:
    pool, gate, begun = TurnThreads(1, "one"), threading.Event(), threading.Event()
    ran: list[bool] = []

    async def run() -> None:
        other = asyncio.create_task(pool.run(1, lambda: begun.set() or gate.wait(PATIENCE_S)))
        await until(begun.is_set)
        await pool.run(1, lambda: ran.append(True))
        await other

    async def end() -> None:
        gate.set()

    assert "thread" in waited(run, end)
    assert ran


def test_work_does_not_wait_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, clock = TurnThreads(1, "one"), SimpleNamespace(now=1.0)
    for module in (threads, works):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def job() -> None:
        clock.now += 5

    async def slow() -> None:
        await pool.run(1, job)

    async def nothing() -> None:
        pass

    assert waited(slow, nothing) == set()
    assert clock.now == 6.0


def test_a_request_waits_for_its_turn_on_the_event_loop() -> None:
    async def run() -> None:
        await loop_turn(1.0)
        asyncio.get_running_loop().call_soon(time.sleep, LONG_S)
        await loop_turn(1.0)

    async def nothing() -> None:
        pass

    assert "loop" in waited(run, nothing)


def test_a_body_waits_for_the_memory_of_others() -> None:
    budget = BodyBudget(100)

    async def run() -> None:
        await budget.take(90, PATIENCE_S, "a")
        await budget.take(60, PATIENCE_S, "b")

    async def end() -> None:
        budget.give_back(90, "a")

    assert "body" in waited(run, end)


def test_a_request_waits_until_its_model_is_loaded() -> None:
    machine = Machine(1)
    gate = machine.gates["a"] = asyncio.Event()
    registry = machine.registry("a")

    async def run() -> None:
        await use(registry, "a")
        await use(registry, "a")

    async def end() -> None:
        gate.set()

    assert "model" in waited(run, end)
