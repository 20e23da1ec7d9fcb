"""ReplicaClient: deaths and restarts with real processes."""

import asyncio
import os
import signal
from contextlib import aclosing
from pathlib import Path

import pytest

from cpuserve.base.errors import EngineDead, InvalidRequest
from cpuserve.engine.ipc import AddRequest
from cpuserve.engine.replicas import ReplicaClient
from cpuserve.sampling.params import SamplingParams
from tests.engine.fake_replicas import PROMPT
from tests.helpers.fake_executor import fake_config, reference
from tests.helpers.patience import PATIENCE_S, until

MODULE = "tests.helpers.fake_engine"


def with_processes(body, model="fake", count=2, **changes):
    """Run `body(client)` with `count` fake engine processes, all of which end with it."""

    async def main():
        configs = [fake_config(model=model, seed=1, **changes) for _ in range(count)]
        client = ReplicaClient.spawn(configs, module=MODULE)
        pids = {r.engine.pid for r in client._replicas}
        try:
            await client.wait_ready()
            await asyncio.wait_for(body(client), PATIENCE_S)
            pids |= {r.engine.pid for r in client._replicas}
        finally:
            await client.close()
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]

    asyncio.run(main())


async def collect(client, prompt, **params):
    tokens = []
    async for output in client.generate(AddRequest.of(prompt, SamplingParams(seed=1, **params))):
        tokens += output.tokens
    return tokens


def engine_of(client, index):
    return client._replicas[index].engine


def test_kill_9_of_one_ends_its_streams_only_and_it_starts_again():
    async def body(client):
        prompts = [[n + 20] * 40 for n in range(8)]
        wanted = {"max_tokens": 60, "ignore_eos": True}
        tasks = [asyncio.create_task(collect(client, p, **wanted)) for p in prompts]
        await until(lambda: [r.stats.running for r in client.replicas] == [4, 4])
        os.kill(engine_of(client, 0).pid, signal.SIGKILL)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        lost = [r for r in results if isinstance(r, EngineDead)]
        assert len(lost) == 4
        assert all("SIGKILL" in error.message for error in lost)
        params = SamplingParams(**wanted)
        for prompt, result in zip(prompts, results, strict=True):
            if not isinstance(result, EngineDead):
                assert result == reference(prompt, params, 1, 60)
        assert client.alive
        await until(lambda: all(r.serves for r in client.replicas))
        assert [r.restarts for r in client.replicas] == [1, 0]
        results = await asyncio.gather(*(collect(client, p, **wanted) for p in prompts))
        assert results == [reference(p, params, 1, 60) for p in prompts]
        assert all(r.stats.generation_tokens for r in client.replicas)

    with_processes(body, "fake:slow")


def test_a_request_right_after_the_end_of_an_engine_is_told_how_it_ended():
    async def body(client):
        for _ in range(2):
            os.kill(engine_of(client, 0).pid, signal.SIGKILL)
            await until(lambda: not client.alive, poll_s=0)
            while not client.alive:
                with pytest.raises(EngineDead, match=r"killed by SIGKILL|^the engine ends$"):
                    await collect(client, PROMPT)
                await asyncio.sleep(0)

    with_processes(body, count=1)


def test_closing_a_stream_aborts_it_and_a_refusal_costs_no_load():
    async def body(client):
        async with aclosing(
            client.generate(AddRequest.of(PROMPT, SamplingParams(max_tokens=90)))
        ) as stream:
            await anext(stream)
            assert sum(r.load for r in client._replicas) == 1.0
        with pytest.raises(InvalidRequest, match="context length"):
            await collect(client, [1] * 500)
        assert [r.load for r in client._replicas] == [0.0, 0.0]
        await until(lambda: client.stats.running == 0)
        reports = (await client.ask("report"))["replicas"]
        assert [r["running"] for r in reports] == [0, 0]

    with_processes(body, "fake:slow")


@pytest.mark.deep
def test_a_replica_that_dies_while_it_starts_again_is_started_once_more():
    async def body(client):
        dead = engine_of(client, 1)
        os.kill(dead.pid, signal.SIGKILL)
        await until(lambda: engine_of(client, 1) is not dead)
        os.kill(engine_of(client, 1).pid, signal.SIGKILL)
        await until(lambda: client.replicas[1].serves)
        assert len(await collect(client, PROMPT, max_tokens=5, ignore_eos=True)) == 5

    with_processes(body)


@pytest.mark.deep
def test_an_engine_started_again_may_use_the_cpus_the_first_one_might():
    allowed = os.sched_getaffinity(0)

    async def body(client):
        os.sched_setaffinity(0, [min(allowed)])
        dead = engine_of(client, 0)
        os.kill(dead.pid, signal.SIGKILL)
        await until(lambda: client.replicas[0].restarts == 1)
        assert os.sched_getaffinity(engine_of(client, 0).pid) == allowed
        assert os.sched_getaffinity(0) == {min(allowed)}

    try:
        with_processes(body)
    finally:
        os.sched_setaffinity(0, allowed)


def test_kill_ends_all_of_them_without_a_loop():
    client = ReplicaClient.spawn([fake_config()] * 2, module=MODULE)
    pids = [r.engine.pid for r in client._replicas]
    client.kill()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
