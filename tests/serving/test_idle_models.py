"""Models that nobody uses: unloaded after a time, put to sleep, or unloaded to make room."""

import asyncio
import math

import pytest

from cpuserve.base.errors import ServiceUnavailable, TooLittleMemory
from cpuserve.serving.models.registry import Idleness, ModelRegistry
from tests.api.fakes import make_context
from tests.helpers.patience import PATIENCE_S
from tests.serving.test_registry import GIB, Machine, use


class Sleeper:
    """Puts the first model to sleep; it takes one of the machine's places."""

    def __init__(self, machine):
        self.machine = machine

    async def sleep(self):
        self.machine.log.append(("sleep", "tiny"))
        self.machine.room += 1

    async def wake(self, context, promised_bytes):
        self.machine.log.append(("wake", "tiny", promised_bytes // GIB))
        if not self.machine.room:
            msg = "1 GiB more is needed"
            raise TooLittleMemory(msg)
        self.machine.room -= 1

    async def rest(self, context):
        self.machine.log.append(("rest",))


def idle_registry(machine, *names, **idleness):
    first = make_context()
    first.kv_bytes = 3 * GIB
    return ModelRegistry(
        first,
        machine.loaders(*names),
        lambda: machine.now,
        sleeper=Sleeper(machine),
        idleness=Idleness(**idleness),
    )


async def until(is_true):
    async with asyncio.timeout(PATIENCE_S):
        while not is_true():
            await asyncio.sleep(0.001)


def test_two_models_in_a_memory_for_one_take_turns():
    machine = Machine(0)
    registry = idle_registry(machine, "b")

    async def main():
        for _ in range(3):
            await use(registry, "b")
            assert registry.status("tiny") == "sleeping"
            assert registry.peek("tiny") is registry.first, "its facts are still known"
            await use(registry, "tiny")
            assert registry.status("b") == "unloaded"

    asyncio.run(main())
    turn = [("load", "b", 3), ("sleep", "tiny"), ("load", "b", 0), ("wake", "tiny", 1)]
    assert machine.log[:4] == turn
    assert machine.log.count(("unload", "b")) == 3


def test_a_model_is_unloaded_when_its_time_is_over():
    machine = Machine(2)
    registry = idle_registry(machine, "b", model_s=0.0)

    async def main():
        served = await registry.find("b")
        await asyncio.sleep(0.01)
        assert registry.peek("b") is not None, "a request uses it"
        served.lease.release()
        await until(lambda: registry.peek("b") is None)
        assert registry.status("tiny") == "loaded", "its time has not begun"
        registry.watch_idle()
        await until(lambda: registry.asleep)
        await until(lambda: machine.log[-1] == ("rest",))
        await use(registry, None)
        assert registry.status("tiny") == "loaded"

    asyncio.run(main())


def test_a_request_chooses_how_long_its_model_stays():
    machine = Machine(2)
    registry = idle_registry(machine, "b")

    async def main():
        served = await registry.find("b")
        assert registry.expires_s("b") == math.inf
        served.lease.keep(600.0)
        served.lease.release()
        machine.now += 200.0
        assert registry.expires_s("b") == 400.0
        await use(registry, "b")
        assert registry.expires_s("b") == math.inf, "the next one did not say"
        served = await registry.find("b")
        served.lease.keep(0.0)
        served.lease.release()
        await until(lambda: registry.peek("b") is None)

    asyncio.run(main())


def test_a_request_that_comes_in_time_keeps_the_model():
    machine = Machine(2)
    registry = idle_registry(machine, "b", model_s=0.0)

    async def main():
        first = await registry.find("b")
        first.lease.release()
        second = await registry.find("b")
        await asyncio.sleep(0.02)
        assert registry.peek("b") is second.context
        second.lease.release()
        registry.stop_loading()

    asyncio.run(main())


def test_all_models_sleep_when_the_server_is_idle():
    machine = Machine(2)
    registry = idle_registry(machine, "b", server_s=0.0)

    async def main():
        served = await registry.find("b")
        await use(registry, "tiny")
        await asyncio.sleep(0.02)
        assert not registry.asleep, "b is in use"
        served.lease.release()
        await until(lambda: registry.asleep)
        await until(lambda: machine.log[-1] == ("rest",))
        assert list(registry.contexts()) == [registry.first]

    asyncio.run(main())


def test_a_request_waits_until_a_model_in_use_makes_room():
    machine = Machine(0)
    registry = idle_registry(machine, "b", room_s=PATIENCE_S)

    async def main():
        first = await registry.find("tiny")
        waiting = asyncio.create_task(registry.find("b"))
        await until(lambda: machine.log)
        await asyncio.sleep(0.01)
        assert not waiting.done()
        first.lease.release()
        assert (await waiting).name == "b"

    asyncio.run(main())


def test_a_server_that_stops_wakes_nothing():
    registry = idle_registry(Machine(1))

    async def main():
        assert await registry.sleep()
        registry.stop_loading()
        with pytest.raises(ServiceUnavailable, match="shutting down"):
            await registry.find("tiny")

    asyncio.run(main())


def test_a_model_that_cannot_be_woken_is_tried_again_after_a_pause():
    machine = Machine(0)
    registry = idle_registry(machine)

    async def main():
        assert await registry.sleep()
        machine.room = 0
        for _ in range(3):
            with pytest.raises(ServiceUnavailable, match="does not fit: 1 GiB more is needed"):
                await registry.find("tiny")
        assert [entry[0] for entry in machine.log].count("wake") == 1
        machine.now, machine.room = machine.now + 10.0, 1
        await use(registry, "tiny")

    asyncio.run(main())
