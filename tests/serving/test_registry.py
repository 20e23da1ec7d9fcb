"""Models on demand: loaded once, unloaded to make room, refused with a reason."""

import asyncio
import errno

import pytest

from cpuserve.base.errors import ModelError, NotFound, ServiceUnavailable, TooLittleMemory
from cpuserve.serving.models.preset import Preset
from cpuserve.serving.models.registry import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    MAX_CREATED_LOADED,
    ModelRegistry,
)
from tests.api.fakes import FakeEngine, make_context

GIB = 1 << 30


class Machine:
    """Memory for some models, and loaders that take 1 GiB of it each while they are loaded."""

    def __init__(self, room):
        self.room = room
        self.now = 100.0
        self.log = []
        self.gates = {}

    def loaders(self, *names):
        return [Loader(self, name) for name in names]

    def registry(self, *names):
        first = make_context()
        first.kv_bytes = 3 * GIB
        return ModelRegistry(first, self.loaders(*names), lambda: self.now)


class Loader:
    most_body_bytes = 64 << 20
    aliases = ()
    adapters = {}  # noqa: RUF012

    def __init__(self, machine, name):
        self.machine = machine
        self.name = name

    async def pooling(self):
        return None

    async def load(self, promised_bytes):
        machine = self.machine
        machine.log.append(("load", self.name, promised_bytes // GIB))
        if self.name in machine.gates:
            await machine.gates[self.name].wait()
        if self.name == "broken":
            msg = "model broken is not there"
            raise ModelError(msg)
        if self.name == "full disk":
            raise OSError(errno.ENOSPC, "No space left on device", "/secret/path")
        if not machine.room:
            msg = "not enough memory: 1 GiB more is needed"
            raise TooLittleMemory(msg)
        machine.room -= 1
        engine = FakeEngine()
        context = make_context(engine)
        context.kv_bytes = GIB
        close = engine.close

        async def closed():
            machine.log.append(("unload", self.name))
            machine.room += 1
            await close()

        engine.close = closed
        return context


async def use(registry, name):
    """Find a model as a request does, and end the request."""
    served = await registry.find(name)
    served.lease.release()
    return served.context, served.name


def found(registry, *names):
    """Find the models one after the other."""

    async def main():
        return [await use(registry, name) for name in names]

    return asyncio.run(main())


def test_the_first_model_answers_for_no_name_and_for_its_own():
    machine = Machine(0)
    registry = machine.registry("b")
    first = registry.first
    assert found(registry, None, "", "tiny", "alias", "tiny:latest", "alias:latest") == [
        *[(first, "tiny")] * 3, (first, "alias"), (first, "tiny"), (first, "alias"),
    ]  # fmt: skip
    assert machine.log == []
    assert registry.names == ("tiny", "alias", "b")


def test_created_models_have_a_bounded_number_of_engines():
    machine = Machine(100)
    registry = machine.registry("b")
    names = [f"made-{i}" for i in range(MAX_CREATED_LOADED + 2)]
    for name in names:
        registry.create_with(name, Preset(), Loader(machine, name), name)
    found(registry, "b", *names)
    assert [entry[1] for entry in machine.log if entry[0] == "unload"] == names[:2]
    assert registry.is_loaded("b")  # a model of the start does not make room for them


def test_a_model_is_loaded_when_it_is_named_and_stays():
    machine = Machine(2)
    registry = machine.registry("b", "c")
    (b, name), again, (c, _) = found(registry, "b", "b:latest", "c")
    assert again == (b, name) == (b, "b")
    assert c is not b
    assert list(registry.loaded()) == [registry.first, b, c]
    assert registry.peek("c") is c
    # What the caches of the loaded models may take is promised to them.
    assert machine.log == [("load", "b", 3), ("load", "c", 4)]


def test_requests_of_one_moment_load_a_model_once():
    machine = Machine(1)
    registry = machine.registry("b")

    async def main():
        machine.gates["b"] = asyncio.Event()
        tasks = [asyncio.create_task(use(registry, "b")) for _ in range(4)]
        await asyncio.sleep(0)
        tasks[0].cancel()  # its client leaves; the others wait on
        await asyncio.sleep(0)
        machine.gates["b"].set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, *others = asyncio.run(main())
    assert isinstance(first, asyncio.CancelledError)
    assert len({id(context) for context, _ in others}) == 1
    assert machine.log == [("load", "b", 3)]


def test_the_model_that_was_used_longest_ago_makes_room():
    machine = Machine(2)
    registry = machine.registry("b", "c", "d")

    async def main():
        for name in ("b", "c", "b", "d"):
            machine.now += 1.0
            await use(registry, name)

    asyncio.run(main())
    assert ("unload", "c") in machine.log
    assert ("unload", "b") not in machine.log
    assert registry.peek("c") is None
    assert registry.peek("d") is not None


def test_a_model_in_use_is_not_unloaded():
    """However long its requests take before and after they run, such as to tokenize a prompt."""
    machine = Machine(1)
    registry = machine.registry("b", "c")

    async def main():
        leases = [(await registry.find("b")).lease for _ in range(2)]
        for lease in leases:
            machine.now += 1000.0
            with pytest.raises(ServiceUnavailable, match="does not fit beside b, in use now"):
                await registry.find("c")
            await registry.unload("b")
            assert registry.peek("b") is not None
            lease.release()
            lease.release()  # which counts once
        assert (await use(registry, "c"))[1] == "c"

    asyncio.run(main())
    assert registry.peek("b") is None


def test_a_model_that_has_just_been_loaded_waits_for_the_request_that_named_it():
    """Another request that needs its memory may be the next to run."""
    machine = Machine(1)
    registry = machine.registry("b", "c")

    async def main():
        machine.gates["b"] = asyncio.Event()
        asked = [asyncio.create_task(registry.find(name)) for name in ("b", "c")]
        await asyncio.sleep(0.01)
        machine.gates["b"].set()
        return await asyncio.gather(*asked, return_exceptions=True)

    b, refused = asyncio.run(main())
    assert b.context.client.alive
    assert isinstance(refused, ServiceUnavailable)


def test_a_request_that_leaves_while_its_model_loads_holds_nothing():
    machine = Machine(1)
    registry = machine.registry("b", "c")

    async def main():
        machine.gates["b"] = asyncio.Event()
        left = asyncio.create_task(registry.find("b"))
        await asyncio.sleep(0.01)
        left.cancel()
        machine.gates["b"].set()
        await asyncio.gather(left, return_exceptions=True)
        await asyncio.sleep(0.01)
        assert registry.peek("b") is not None
        await use(registry, "c")

    asyncio.run(main())


def test_a_client_may_unload_a_model():
    machine = Machine(1)
    registry = machine.registry("b")

    async def main():
        await use(registry, "b")
        await registry.unload("tiny")
        await registry.unload("b:latest")
        assert registry.peek("b") is None
        await registry.unload("b")
        await use(registry, "b")

    asyncio.run(main())
    assert registry.first.client.alive
    assert [entry[:2] for entry in machine.log] == [("load", "b"), ("unload", "b"), ("load", "b")]


def test_a_model_that_never_fits_says_what_it_needs():
    machine = Machine(0)
    with pytest.raises(ServiceUnavailable, match=r"'b' does not fit: .* 1 GiB more is needed"):
        found(machine.registry("b"), "b")


def test_a_model_that_cannot_be_loaded_does_not_unload_another(caplog):
    machine = Machine(2)
    registry = machine.registry("b", "broken")

    async def main():
        await use(registry, "b")
        with pytest.raises(ServiceUnavailable, match="cannot be loaded: model broken is not"):
            await registry.find("broken")

    asyncio.run(main())
    assert registry.peek("b") is not None
    failed = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert len(failed) == 1, "the operator must learn it, too, not only the client"
    assert failed[0].startswith("model broken cannot be loaded: model broken is not")


@pytest.mark.parametrize("name", ["broken", "large", "full disk"])
def test_a_model_that_failed_is_tried_again_after_growing_pauses(name):
    """Meanwhile each request is told at once why, and when it is tried again."""
    machine = Machine(0)
    registry = machine.registry(name)

    async def refusal():
        with pytest.raises(ServiceUnavailable) as raised:
            await registry.find(name)
        return raised.value

    async def main():
        pause = FIRST_PAUSE_S
        for tries in range(1, 10):
            first, machine.now = await refusal(), machine.now + pause / 2
            again, machine.now = await refusal(), machine.now + pause / 2
            assert len(machine.log) == tries
            assert (first.retry_after_s, again.retry_after_s) == (pause, pause / 2)
            assert first.message.split(". It can be")[0] == again.message.split(". It can be")[0]
            assert "secret" not in first.message
            assert again.message.endswith(f". It can be tried again in {pause / 2:.0f} s")
            pause = min(2 * pause, LONGEST_PAUSE_S)
        if name == "large":
            machine.room = 1
            await use(registry, name)
            machine.room = 0
            registry.peek(name).client.alive = False
            machine.room = -1
            assert (await refusal()).retry_after_s == FIRST_PAUSE_S, "a success ends the series"

    asyncio.run(main())


def test_a_model_whose_engine_has_ended_is_loaded_again():
    machine = Machine(2)
    registry = machine.registry("b")

    async def main():
        before, _ = await use(registry, "b")
        before.client.alive = False
        after, _ = await use(registry, "b")
        assert after is not before
        assert after.client.alive

    asyncio.run(main())
    assert machine.log == [("load", "b", 3), ("unload", "b"), ("load", "b", 3)]


def test_closing_ends_what_is_loaded_and_what_is_loading():
    machine = Machine(2)
    registry = machine.registry("b", "c")

    async def main():
        await use(registry, "b")
        machine.gates["c"] = asyncio.Event()
        loading = asyncio.create_task(registry.find("c"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await registry.close()
        await asyncio.gather(loading, return_exceptions=True)

    asyncio.run(main())
    assert ("unload", "b") in machine.log
    assert list(registry.loaded()) == [registry.first]


def test_a_server_that_stops_gives_loads_up_and_says_so_and_a_loaded_model_still_answers():
    machine = Machine(2)
    registry = machine.registry("b", "c")

    async def main():
        await registry.find("b")
        machine.gates["c"] = asyncio.Event()
        loading = asyncio.create_task(registry.find("c"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        registry.stop_loading()
        for refused in (loading, registry.find("c")):
            with pytest.raises(ServiceUnavailable, match="shutting down"):
                await refused
        assert (await registry.find("b")).name == "b"

    asyncio.run(main())


def test_a_name_that_is_not_served_is_404():
    registry = Machine(1).registry("b")
    for find in (lambda: found(registry, "x"), lambda: registry.peek("x")):
        with pytest.raises(NotFound, match="This server serves: tiny, alias, b"):
            find()
