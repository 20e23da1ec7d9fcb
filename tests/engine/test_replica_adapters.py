"""ReplicaClient: all replicas have the same adapters, also after a death."""

import pytest

from cpuserve.base.errors import EngineDead
from cpuserve.engine.ipc import AddRequest
from cpuserve.sampling.params import SamplingParams
from tests.engine.fake_replicas import Engine, with_fakes
from tests.helpers.patience import until


def load(client, name, path, in_place=False):
    return client.ask("load_adapter", name=name, path=path, in_place=in_place)


def adapters_of(engines):
    return [lives[-1].adapters for lives in engines]


def test_all_replicas_have_the_same_adapters(monkeypatch):
    monkeypatch.setattr(Engine, "disk", {"/a": "print a", "/b": "print b", "/c": ""})

    async def body(client, engines):
        await client.wait_ready()
        assert await load(client, "a", "/a") == {}
        assert adapters_of(engines) == [{"a": "print a"}] * 2
        assert await load(client, "b", "/b") == {}
        assert await client.ask("unload_adapter", name="a") == {}
        assert adapters_of(engines) == [{"b": "print b"}] * 2
        assert await load(client, "b", "/c", in_place=True) == {
            "error": "adapter b: is broken",
            "fault": True,
        }
        assert adapters_of(engines) == [{"b": "print b"}] * 2

    with_fakes(body)


def test_an_adapter_that_one_replica_refuses_or_reads_differently_is_loaded_in_none(monkeypatch):
    monkeypatch.setattr(Engine, "disk", {"/a": "print a"})

    async def body(client, engines):
        await client.wait_ready()
        for other, why in (("", "is broken"), ("print b", "changed while they were being read")):
            engines[1][0].disk = {"/a": other}
            assert why in (await load(client, "a", "/a"))["error"]
            assert adapters_of(engines) == [{}, {}]
        engines[1][0].disk = Engine.disk
        assert await load(client, "a", "/a") == {}

    with_fakes(body)


def test_a_replica_that_is_started_again_loads_and_unloads_what_the_others_did(monkeypatch):
    monkeypatch.setattr(Engine, "disk", {"/a": "print a", "/b": "print b"})

    async def body(client, engines):
        await client.wait_ready()
        for lives in engines:
            lives[0].adapters["start"] = "print start"
        await load(client, "a", "/a")
        await load(client, "b", "/b")
        await client.ask("unload_adapter", name="start")
        await client.ask("unload_adapter", name="b")
        engines[0][0].die()
        await until(lambda: client.replicas[0].restarts == 1)
        assert client.replicas[0].serves
        assert adapters_of(engines) == [{"a": "print a"}] * 2

    with_fakes(body)


@pytest.mark.parametrize("then", ["", "print of something else"], ids=["broken", "changed"])
def test_a_replica_that_cannot_load_an_adapter_again_gets_none_of_its_requests(
    monkeypatch, caplog, then
):
    monkeypatch.setattr(Engine, "disk", {"/a": "print a"})
    params = SamplingParams(adapter="a")

    async def body(client, engines):
        await client.wait_ready()
        await load(client, "a", "/a")
        Engine.disk["/a"] = then
        engines[0][0].die()
        await until(lambda: client.replicas[0].restarts == 1)
        assert adapters_of(engines) == [{}, {"a": "print a"}]
        streams = [client.generate(AddRequest.of([5 + i] * 64, params)) for i in range(4)]
        for stream in streams:
            await anext(stream)
        assert [len(lives[-1].prompts) for lives in engines] == [0, 4]
        engines[1][0].die()
        await until(lambda: client.replicas[1].restarts == 1)
        with pytest.raises(EngineDead, match="the adapter a could not be loaded again"):
            await anext(client.generate(AddRequest.of([9] * 64, params)))
        Engine.disk["/a"] = "print a3"
        assert await load(client, "a", "/a", in_place=True) == {}
        await anext(client.generate(AddRequest.of([9] * 64, params)))

    with caplog.at_level("ERROR", "cpuserve"):
        with_fakes(body)
    assert "load it again, in place" in caplog.text


def test_an_adapter_is_loaded_while_a_replica_is_dead_and_after_its_start(monkeypatch):
    monkeypatch.setattr(Engine, "disk", {"/a": "print a"})

    async def body(client, engines):
        await client.wait_ready()
        engines[0][0].die()
        assert await load(client, "a", "/a") == {}
        assert engines[1][0].adapters == {"a": "print a"}
        await until(lambda: client.replicas[0].restarts == 1)
        assert adapters_of(engines) == [{"a": "print a"}] * 2

    with_fakes(body)


def test_without_an_engine_no_adapter_can_be_loaded(monkeypatch):
    monkeypatch.setattr(Engine, "disk", {"/a": "print a"})

    async def body(client, engines):
        await client.wait_ready()
        engines[0][0].die()
        with pytest.raises(EngineDead):
            await load(client, "a", "/a")

    with_fakes(body, count=1)
