"""ReplicaClient: its rules with fake engines, deaths and restarts with real processes."""

import asyncio
import os
import signal
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest

from cpuserve.engine.ipc import Output, Stats
from cpuserve.engine.process import DiedAtStart
from cpuserve.engine.replicas import ReplicaClient, RestartPolicy
from cpuserve.errors import EngineDead, InvalidRequest, StartupError
from cpuserve.sampling.params import SamplingParams
from tests.helpers.fake_executor import fake_config, reference
from tests.helpers.patience import PATIENCE_S, until

MODULE = "tests.helpers.fake_engine"
PROMPT = list(range(11, 75))
FAST = RestartPolicy(first_s=0.01, longest_s=0.02)


class Engine:
    """A fake engine that the test controls. starts: True, False, or "dies".

    disk: the fingerprints of adapters by their paths, "" of one that is broken.
    """

    disk: ClassVar[dict[str, str]] = {}

    def __init__(self, starts=True):
        self.adapters = {}
        self._staged = None
        self.info = {}
        self.stats = Stats()
        self.on_step = None
        self.replicas = ()
        self.prompts = []
        self.starts = starts
        self.closed = self.hung = False
        self.trouble = "the engine hangs"
        self.checked = {"ok": True}
        self._death = asyncio.Event()
        self._gate = asyncio.Event()
        self._how = ""

    @property
    def alive(self):
        return bool(self.info) and not self.closed and not self._death.is_set()

    @property
    def ended(self):
        return not self.alive

    async def wait_ready(self):
        if self.starts == "dies":
            msg = "the engine was killed"
            raise DiedAtStart(msg)
        if not self.starts:
            msg = "no memory"
            raise StartupError(msg)
        self.info = {"vocab_size": 1000}

    async def wait_ended(self):
        await self._death.wait()
        return self._how

    async def generate(self, prompt_ids, params, priority=0, *, timeout_s=None, progress=False):
        self.prompts.append(list(prompt_ids))
        yield Output(0, [1])
        await self._gate.wait()
        if self._how:
            raise EngineDead(self._how)
        yield Output(0, [2], "stop")

    async def ask(self, what, **details):
        if what.endswith("_adapter"):
            return await self._change(what, **details)
        return self.checked if what == "check" else {"placement": [len(self.prompts)]}

    async def _change(self, what, name, path="", in_place=False):
        await asyncio.sleep(0)
        if self._how:
            raise EngineDead(self._how)
        staged, self._staged = self._staged, None
        if what == "stage_adapter":
            assert in_place or name not in self.adapters
            if not self.disk[path]:
                return {"error": f"adapter {name}: is broken", "fault": True}
            self._staged = name, self.disk[path]
            return {"fingerprint": self.disk[path]}
        if what == "use_adapter":
            assert staged[0] == name
            self.adapters[name] = staged[1]
        elif what == "unload_adapter":
            self.adapters.pop(name, None)
        return {}

    async def close(self):
        self.closed = True

    def kill(self):
        self.closed = True

    def go_on(self):
        self._gate.set()

    def die(self, how="the engine was killed"):
        self._how = how
        self._death.set()
        self._gate.set()

    def count(self, **stats):
        """Report these statistics, as after a step."""
        self.stats = Stats(**stats)
        if self.on_step is not None:
            self.on_step(self.stats)


def with_fakes(body, count=2, starts=lambda index, life: True, block_size=32, policy=FAST):
    """Run `body(client, engines)`; engines[i] are all that have been replica i."""

    async def main():
        engines = [[] for _ in range(count)]

        def spawn(index, on_progress):
            engines[index].append(Engine(starts(index, len(engines[index]))))
            return engines[index][-1]

        client = ReplicaClient(spawn, count, block_size, policy)
        try:
            await asyncio.wait_for(body(client, engines), PATIENCE_S)
        finally:
            await client.close()
        assert all(engine.closed for lives in engines for engine in lives)

    asyncio.run(main())


async def first_of(client, prompt=PROMPT):
    """Return a stream after its first output has been read."""
    stream = client.generate(list(prompt), SamplingParams())
    await anext(stream)
    return stream


def test_a_conversation_stays_and_others_go_to_the_least_loaded():
    async def body(client, engines):
        await client.wait_ready()
        streams = [await first_of(client), await first_of(client, [5] * 64)]
        assert [len(lives[0].prompts) for lives in engines] == [1, 1]
        home = next(i for i, lives in enumerate(engines) if lives[0].prompts == [PROMPT])
        streams += [await first_of(client, [*PROMPT, *range(9)])]
        assert len(engines[home][0].prompts) == 2
        streams += [await first_of(client) for _ in range(3)]
        assert len(engines[home][0].prompts) == 4, "the last request overloads this replica"
        assert len(engines[1 - home][0].prompts) == 2
        for stream in streams:
            await stream.aclose()

    with_fakes(body)


def test_before_it_is_ready_and_after_it_is_closed_it_serves_nobody():
    async def body(client, engines):
        assert not client.alive
        assert not client.ended
        assert client.info == {}
        with pytest.raises(EngineDead, match="not ready"):
            await first_of(client)
        await client.wait_ready()
        assert client.alive
        assert client.info["vocab_size"] == 1000
        await client.close()
        assert client.ended
        assert not client.alive

    with_fakes(body)


def test_a_replica_that_cannot_start_at_first_is_the_servers_error():
    async def body(client, engines):
        with pytest.raises(StartupError, match="no memory"):
            await client.wait_ready()
        assert not client.alive

    with_fakes(body, starts=lambda index, life: index == 0)


def test_the_death_of_one_ends_its_streams_and_no_others():
    async def body(client, engines):
        await client.wait_ready()
        streams = [await first_of(client), await first_of(client, [5] * 64)]
        engines[0][0].die()
        with pytest.raises(EngineDead, match="killed"):
            await anext(streams[0])
        assert client.alive
        assert [r.serves for r in client.replicas] == [False, True]
        later = await first_of(client)
        assert engines[1][0].prompts == [[5] * 64, PROMPT]
        engines[1][0].go_on()
        assert (await anext(streams[1])).finish == "stop"
        await later.aclose()
        await until(lambda: len(engines[0]) == 2 and engines[0][1].alive)
        assert engines[0][0].closed
        await until(lambda: client.replicas[0].serves)
        assert client.replicas[0].restarts == 1

    with_fakes(body)


def test_when_all_die_it_waits_for_them():
    async def body(client, engines):
        await client.wait_ready()
        for lives in engines:
            lives[0].die()
        assert not client.alive
        assert not client.ended
        with pytest.raises(EngineDead, match="started again"):
            await first_of(client)
        with pytest.raises(EngineDead, match="started again"):
            await client.ask("check")
        await until(lambda: client.alive)
        await (await first_of(client)).aclose()

    with_fakes(body)


@pytest.mark.parametrize("fails", [False, "dies"])
def test_a_replica_whose_starts_fail_is_tried_for_ever_while_the_rest_serves(fails, caplog):
    """The volume of the model may be missing for half a minute, which is many attempts."""

    async def body(client, engines):
        await client.wait_ready()
        engines[1][0].die()
        await until(lambda: len(engines[1]) >= 20)
        assert client.alive
        assert not client.ended
        assert [r.serves for r in client.replicas] == [True, False]
        await until(lambda: client.replicas[1].serves)
        assert len(engines[1]) == 31
        assert client.replicas[1].restarts == 1
        assert caplog.text.count("replica 1: ") == 1 + 29, "its death, and each failure"

    with_fakes(body, starts=lambda index, life: True if index == 0 or life in (0, 30) else fails)


@pytest.mark.parametrize(("deaths", "serves"), [(1, True), (2, True), (3, False)])
@pytest.mark.parametrize("count", [1, 2])
def test_an_engine_that_dies_while_it_starts_first_is_tried_three_times(count, deaths, serves):
    async def body(client, engines):
        if serves:
            await client.wait_ready()
            assert client.alive
        else:
            with pytest.raises(DiedAtStart, match="was killed"):
                await client.wait_ready()
        assert len(engines[0]) == min(deaths + 1, 3)

    with_fakes(body, count, starts=lambda index, life: True if life >= deaths else "dies")


def test_an_engine_that_says_why_it_cannot_start_is_not_started_again():
    async def body(client, engines):
        with pytest.raises(StartupError, match="no memory"):
            await client.wait_ready()
        assert len(engines[0]) == 1

    with_fakes(body, 1, starts=lambda index, life: False)


def test_a_single_engine_is_started_again_and_says_meanwhile_how_it_died():
    async def body(client, engines):
        await client.wait_ready()
        stream = await first_of(client)
        engines[0][0].count(generation_tokens=7)
        engines[0][0].die("the engine ran out of memory")
        with pytest.raises(EngineDead, match=r"^the engine ran out of memory$"):
            await anext(stream)
        await asyncio.sleep(0)
        for asked in (first_of(client), client.ask("report")):
            with pytest.raises(EngineDead, match="ran out of memory; it is being started again"):
                await asked
        assert not client.ended
        await until(lambda: client.alive)
        assert (client.replicas[0].restarts, client.stats.generation_tokens) == (1, 7)
        await (await first_of(client)).aclose()

    with_fakes(body, 1)


@pytest.mark.parametrize("count", [1, 2])
def test_without_restarts_it_has_ended_when_the_last_engine_died(count):
    async def body(client, engines):
        await client.wait_ready()
        for replica, lives in zip(client._replicas, engines, strict=True):
            assert not client.ended
            lives[0].die("the engine ran out of memory")
            await until(lambda replica=replica: replica.given_up)
        assert client.ended
        assert [len(lives) for lives in engines] == [1] * count
        with pytest.raises(EngineDead, match=r"^the engine ran out of memory$"):
            await client.ask("check")

    with_fakes(body, count, policy=RestartPolicy(enabled=False))


def test_a_single_engine_that_hangs_serves_nobody_until_it_goes_on():
    async def body(client, engines):
        await client.wait_ready()
        engines[0][0].hung = True
        assert not client.alive
        assert not client.ended
        for asked in (first_of(client), client.ask("report")):
            with pytest.raises(EngineDead, match=r"^the engine hangs$"):
                await asked
        engines[0][0].hung = False
        await (await first_of(client)).aclose()
        assert client.replicas[0].restarts == 0

    with_fakes(body, 1)


def test_without_restarts_the_first_death_while_it_starts_is_the_last():
    async def body(client, engines):
        with pytest.raises(DiedAtStart, match="was killed"):
            await client.wait_ready()
        assert len(engines[0]) == 1

    with_fakes(body, 1, starts=lambda *_: "dies", policy=RestartPolicy(enabled=False))


def test_a_start_that_fails_is_tried_again():
    async def body(client, engines):
        await client.wait_ready()
        engines[0][0].die()
        await until(lambda: client.replicas[0].restarts == 1)
        assert len(engines[0]) == 4
        assert client.replicas[0].serves

    with_fakes(body, starts=lambda index, life: life not in (1, 2))


def test_delays_double_up_to_a_minute():
    delays = [RestartPolicy().delay_s(n) for n in range(1, 12)]
    assert delays == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]


def test_figures_are_summed_and_counters_outlive_an_engine():
    async def body(client, engines):
        await client.wait_ready()
        seen = []
        client.on_step = seen.append
        streams = [await first_of(client), await first_of(client, [5] * 64)]
        assert (client.stats.running, client.stats.waiting) == (0, 2)  # no step has reported them
        engines[0][0].count(
            running=1,
            kv_usage=0.5,
            generation_tokens=7,
            prompt_rate=10.0,
            roofline_bytes_per_s=5e9,
        )
        engines[1][0].count(running=1, kv_usage=0.1, generation_tokens=3, preemptions=2)
        assert [s.generation_tokens for s in seen] == [7, 10]
        total = client.stats
        assert (total.running, total.generation_tokens, total.preemptions) == (2, 10, 2)
        assert total.kv_usage == pytest.approx(0.3)
        assert total.prompt_rate == 10.0
        engines[0][0].die()
        assert client.stats.generation_tokens == 10
        assert client.stats.running == 1
        await until(lambda: client.replicas[0].restarts == 1)
        assert client.stats.generation_tokens == 10
        engines[0][1].count(generation_tokens=5)
        assert client.stats.generation_tokens == 15
        assert client.replicas[0].stats.generation_tokens == 12
        assert client.stats.roofline_bytes_per_s == 5e9, "measured at the start only"
        for stream in streams:
            await stream.aclose()
        assert client.stats.running == 0

    with_fakes(body)


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
        streams = [client.generate([5 + i] * 64, params) for i in range(4)]
        for stream in streams:
            await anext(stream)
        assert [len(lives[-1].prompts) for lives in engines] == [0, 4]
        engines[1][0].die()
        await until(lambda: client.replicas[1].restarts == 1)
        with pytest.raises(EngineDead, match="the adapter a could not be loaded again"):
            await anext(client.generate([9] * 64, params))
        Engine.disk["/a"] = "print a3"
        assert await load(client, "a", "/a", in_place=True) == {}
        await anext(client.generate([9] * 64, params))

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


def test_reports_of_all_and_the_roofline_of_one():
    async def body(client, engines):
        await client.wait_ready()
        stream = await first_of(client)
        assert await client.ask("check") == {"ok": True}
        report = await client.ask("report")
        assert report["placement"] == [1, 0]
        assert report["replicas"] == [{"placement": [1]}, {"placement": [0]}]
        assert "replicas" not in await client.ask("roofline")
        await stream.aclose()

    with_fakes(body)


def test_the_report_of_a_single_engine_is_its_own_with_the_roofline_measured_at_the_start():
    async def body(client, engines):
        await client.wait_ready()
        engines[0][0].count(roofline_bytes_per_s=5e9)
        wanted = {"placement": [0], "roofline_bytes_per_s": 5e9}
        assert await client.ask("report") == wanted
        engines[0][0].die()
        await until(lambda: client.replicas[0].restarts == 1)
        assert await client.ask("report") == wanted

    with_fakes(body, 1)


@pytest.mark.parametrize("bad", [0, 1])
def test_a_check_that_fails_in_one_replica_is_the_answer_of_all(bad):
    async def body(client, engines):
        await client.wait_ready()
        engines[bad][0].checked = {"ok": False, "error": "a block has two owners"}
        assert await client.ask("check") == {"ok": False, "error": "a block has two owners"}

    with_fakes(body)


@dataclass(frozen=True)
class RecordingPolicy(RestartPolicy):
    """Restarts at once, and records the number of deaths in a row at each restart."""

    seen: list = field(default_factory=list)

    def delay_s(self, deaths):
        self.seen.append(deaths)
        return 0.0


@pytest.mark.parametrize(("steady_s", "counted"), [(0.0, [1, 1, 1]), (1e9, [1, 2, 3])])
def test_deaths_are_forgotten_after_a_steady_time_and_only_then(steady_s, counted):
    policy = RecordingPolicy(steady_s=steady_s)

    async def body(client, engines):
        await client.wait_ready()
        for life in range(3):
            engines[0][life].die()
            await until(lambda life=life: client.replicas[0].restarts == life + 1)
        assert policy.seen == counted

    with_fakes(body, policy=policy)


# --- processes ----------------------------------------------------------------------------------


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
    async for output in client.generate(prompt, SamplingParams(seed=1, **params)):
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


def test_closing_a_stream_aborts_it_and_a_refusal_costs_no_load():
    async def body(client):
        async with aclosing(client.generate(PROMPT, SamplingParams(max_tokens=90))) as stream:
            await anext(stream)
            assert sum(r.load for r in client._replicas) == 1.0
        with pytest.raises(InvalidRequest, match="context length"):
            await collect(client, [1] * 500)
        assert [r.load for r in client._replicas] == [0.0, 0.0]
        await until(lambda: client.stats.running == 0)
        reports = (await client.ask("report"))["replicas"]
        assert [r["running"] for r in reports] == [0, 0]

    with_processes(body, "fake:slow")


def test_a_replica_that_dies_while_it_starts_again_is_started_once_more():
    async def body(client):
        dead = engine_of(client, 1)
        os.kill(dead.pid, signal.SIGKILL)
        await until(lambda: engine_of(client, 1) is not dead)
        os.kill(engine_of(client, 1).pid, signal.SIGKILL)
        await until(lambda: client.replicas[1].serves)
        assert len(await collect(client, PROMPT, max_tokens=5, ignore_eos=True)) == 5

    with_processes(body)


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
