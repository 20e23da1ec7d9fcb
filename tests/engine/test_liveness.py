"""Hang detection: its rules, then stopped and stuck processes with short limits."""

import asyncio
import os
import signal
from contextlib import asynccontextmanager
from dataclasses import replace

import psutil
import pytest

from cpuserve.base.errors import EngineDead
from cpuserve.engine import process
from cpuserve.engine.ipc import AddRequest
from cpuserve.engine.liveness import HangLimits, Liveness
from cpuserve.engine.process import ProcessClient
from cpuserve.engine.replicas import ReplicaClient, RestartPolicy
from cpuserve.sampling.params import SamplingParams
from tests.helpers.depth import deep_but
from tests.helpers.fake_executor import fake_config
from tests.helpers.patience import PATIENCE_S, until

MODULE = "tests.helpers.fake_engine"
PROMPT = [11, 12, 13]
NEVER = 1e9


def after(seconds, *, has_work=True, elapsed_s=1.0, answer=None):
    """Return a Liveness after `seconds` ticks; answer: the reply to Pings, None = no reply."""
    made = Liveness(HangLimits())
    for _ in range(seconds):
        if made.tick(elapsed_s, has_work) and answer is not None:
            made.pong(answer)
    return made


def test_an_engine_with_work_is_suspect_after_ten_silent_seconds_and_lost_after_sixty():
    assert [after(n).hung for n in (9, 10)] == [False, True]
    assert [after(n).lost for n in (59, 60)] == [False, True]
    assert after(60).symptom == "has not answered for 60 s although it has work"


def test_an_idle_engine_is_never_suspect_and_not_asked():
    made = Liveness(HangLimits())
    assert not any(made.tick(1.0, has_work=False) for _ in range(100))
    assert not made.hung
    assert not made.open(has_work=False)


def test_only_the_first_ping_is_sent_until_it_is_answered():
    made = Liveness(HangLimits())
    assert [made.tick(1.0, has_work=True) for _ in range(3)] == [True, False, False]
    made.pong(advanced=True)
    assert [made.tick(1.0, has_work=True) for _ in range(3)] == [False, True, False]


def test_an_engine_that_answers_that_it_got_on_is_never_suspect():
    assert not after(1000, answer=True).hung


def test_an_engine_that_answers_that_nothing_moves_is_as_bad_as_a_silent_one():
    assert [after(n, answer=False).hung for n in (9, 10)] == [False, True]
    assert after(60, answer=False).symptom == "has made no progress for 60 s although it has work"


def test_outputs_are_a_sign_of_life():
    made = Liveness(HangLimits())
    made.hear()
    for _ in range(100):
        assert not made.tick(1.0, has_work=True), "no Ping is needed"
        made.hear()
    assert not made.hung


@pytest.mark.parametrize("answer", [None, False])
def test_it_stays_suspect_when_its_clients_leave(answer):
    made = after(10, answer=answer)
    assert made.open(has_work=False)
    made.tick(1.0, has_work=False)
    assert made.hung
    made.pong(advanced=True)
    made.tick(1.0, has_work=False)
    assert not made.hung
    assert not made.open(has_work=False)


def test_time_in_which_the_front_end_did_not_run_does_not_count():
    assert not after(4, elapsed_s=100.0).hung


# --- processes ----------------------------------------------------------------------------------


@asynccontextmanager
async def engine(model="fake:slow", limits=None, **changes):
    config = fake_config(model=model, **changes)
    client = ProcessClient.spawn(config, module=MODULE, limits=limits)
    try:
        await client.wait_ready()
        yield client
    finally:
        await client.close()


async def collect(client, max_tokens=150):
    params = SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True)
    return [t async for o in client.generate(AddRequest.of(PROMPT, params)) for t in o.tokens]


def test_a_stopped_engine_is_suspect_and_serves_on_when_it_goes_on():
    limits = HangLimits(tick_s=0.02, suspect_s=0.2, end_s=NEVER)

    async def body():
        async with engine(limits=limits) as client:
            answer = asyncio.create_task(collect(client))
            await until(lambda: client.stats.running == 1)
            os.kill(client.pid, signal.SIGSTOP)
            try:
                await until(lambda: client.hung)
                assert client.alive
                assert "has not answered" in client.trouble
            finally:
                os.kill(client.pid, signal.SIGCONT)
            await until(lambda: not client.hung)
            assert len(await answer) == 150

    asyncio.run(body())


def test_a_stopped_engine_without_work_is_left_alone():
    limits = HangLimits(tick_s=0.01, suspect_s=0.02, end_s=0.03)

    async def body():
        async with engine(limits=limits) as client:
            os.kill(client.pid, signal.SIGSTOP)
            await asyncio.sleep(0.3)
            assert client.alive
            assert not client.hung
            os.kill(client.pid, signal.SIGCONT)

    asyncio.run(body())


@pytest.mark.parametrize(
    ("model", "how"),
    [("fake:slow", "has not answered for"), ("fake:endless", "has made no progress for")],
    ids=["stopped", "stuck step"],
)
def test_an_engine_that_hangs_for_too_long_is_ended_and_its_requests_with_it(model, how):
    limits = HangLimits(tick_s=0.02, suspect_s=0.2, end_s=2)

    async def body():
        async with engine(model, limits) as client:
            answer = asyncio.create_task(collect(client))
            if model == "fake:slow":
                await until(lambda: client.stats.running == 1)
                os.kill(client.pid, signal.SIGSTOP)
            with pytest.raises(EngineDead, match=f"the engine {how} .* and was killed"):
                await asyncio.wait_for(answer, PATIENCE_S)
            assert client.ended

    asyncio.run(body())


def test_calls_of_a_killed_engine_end_although_it_does_not(monkeypatch):
    monkeypatch.setattr(process, "KILL_WAIT_S", 0.1)
    limits = HangLimits(tick_s=0.02, suspect_s=0.2, end_s=0.5)

    async def body():
        async with engine("fake:slow", limits) as client:
            stream = asyncio.create_task(collect(client))
            await until(lambda: client.stats.running == 1)
            kill = client._process.kill
            client._process.kill = lambda: None  # as if it waited for a disk
            os.kill(client.pid, signal.SIGSTOP)
            ask = asyncio.create_task(client.ask("check"))
            for call in (stream, ask):
                with pytest.raises(EngineDead, match=r"has not answered .* but has not ended yet"):
                    await asyncio.wait_for(call, PATIENCE_S)
            await asyncio.sleep(0.1)
            assert client.hung  # no engine is started beside it
            assert not client._ended.is_set()
            kill()
            assert "was killed" in await asyncio.wait_for(client.wait_ended(), PATIENCE_S)
            assert client.ended

    asyncio.run(body())


def cpu_seconds(pid):
    return sum(psutil.Process(pid).cpu_times()[:2])


@pytest.mark.parametrize("model", deep_but(["fake:moving"], ["fake:busy", "fake:moving"]))
def test_a_long_step_is_no_hang(model):
    """The process uses CPU time or its executor advances, and its replies to Pings say so."""

    async def body():
        async with engine(model, HangLimits(tick_s=NEVER)) as client:
            answer = asyncio.create_task(collect(client, 1))
            await until(lambda: client._streams.waiting)
            client._ticking.cancel()
            for _ in range(30):
                used = cpu_seconds(client.pid)
                client._ticking = None
                client._tick(asyncio.get_running_loop().time() - 1)
                await until(lambda: not client._liveness._asked)
                assert not client._liveness._stuck
                await until(
                    lambda used=used: model != "fake:busy" or cpu_seconds(client.pid) > used + 0.1
                )
            answer.cancel()

    asyncio.run(body())


@pytest.mark.deep
def test_a_replica_that_hangs_gets_no_requests_and_is_replaced():
    limits = HangLimits(tick_s=0.02, suspect_s=0.2, end_s=NEVER)

    def spawn(index, on_progress):
        config, own = fake_config(model="fake:slow"), None if index else limits
        return ProcessClient.spawn(config, module=MODULE, limits=own)

    async def body():
        client = ReplicaClient(spawn, 2, 0, RestartPolicy(first_s=0.01))
        try:
            await client.wait_ready()
            stopped = client._replicas[0].engine
            lost = asyncio.create_task(collect(client))
            await until(lambda: stopped.stats.running == 1)
            os.kill(stopped.pid, signal.SIGSTOP)
            await until(lambda: [r.serves for r in client.replicas] == [False, True])
            assert client.alive
            for _ in range(4):
                assert len(await collect(client, 2)) == 2
            assert client._replicas[0].open == 1, "a request went to the replica that hangs"
            assert await client.ask("check") == {"ok": True}
            stopped._liveness._limits = replace(limits, end_s=0.3)
            with pytest.raises(EngineDead, match="has not answered"):
                await lost
            await until(lambda: client.replicas[0].restarts == 1)
            assert [r.serves for r in client.replicas] == [True, True]
        finally:
            await client.close()

    asyncio.run(body())
