"""Engines that sleep: no process stays, and the next ones have their adapters and counters."""

import asyncio

import pytest

from cpuserve.base.errors import EngineDead, StartupError
from tests.engine.fake_replicas import Engine, first_of, with_fakes


def test_sleeping_engines_are_closed_and_woken_ones_serve():
    async def body(client, engines):
        await client.wait_ready()
        engines[0][0].count(prompt_tokens=7, steps=2)
        await client.sleep()
        await client.sleep()
        assert client.asleep
        assert all(lives[0].closed for lives in engines)
        assert client.alive, "health must not report an engine that can be woken as down"
        assert not client.ended
        assert client.stats.prompt_tokens == 7
        with pytest.raises(EngineDead, match="sleeps until the next request"):
            await client.ask("report")
        await client.wake()
        await client.wake()
        assert [len(lives) for lives in engines] == [2, 2]
        await (await first_of(client)).aclose()
        assert client.stats.prompt_tokens == 7
        engines[0][1].count(prompt_tokens=5)
        assert client.stats.prompt_tokens == 12
        assert [replica.restarts for replica in client.replicas] == [0, 0], "nothing died"

    with_fakes(body)


def test_an_engine_that_dies_after_it_was_woken_is_restarted():
    async def body(client, engines):
        await client.wait_ready()
        await client.sleep()
        await client.wake()
        engines[0][1].die()
        async with asyncio.timeout(30):
            while len(engines[0]) < 3 or not engines[0][2].alive:
                await asyncio.sleep(0.001)

    with_fakes(body, count=1)


def test_a_woken_engine_has_the_adapters_that_were_loaded(monkeypatch):
    async def body(client, engines):
        monkeypatch.setattr(Engine, "disk", {"/a": "print", "/b": "other"})
        await client.wait_ready()
        await client.ask("load_adapter", name="a", path="/a", in_place=False)
        await client.ask("load_adapter", name="b", path="/b", in_place=False)
        await client.ask("unload_adapter", name="b")
        await client.sleep()
        await client.wake()
        assert engines[0][1].adapters == {"a": "print"}

    with_fakes(body, count=1)


def test_an_engine_that_cannot_be_woken_sleeps_and_is_tried_again():
    async def body(client, engines):
        await client.wait_ready()
        await client.sleep()
        with pytest.raises(StartupError, match="no memory"):
            await client.wake()
        assert client.asleep
        assert engines[0][1].closed
        await client.wake()
        await (await first_of(client)).aclose()

    with_fakes(body, count=1, starts=lambda index, life: life != 1)
