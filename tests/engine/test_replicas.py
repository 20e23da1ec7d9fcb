"""ReplicaClient: its rules, with fake engines."""

import asyncio
from dataclasses import dataclass, field

import pytest

from cpuserve.base.errors import EngineDead, StartupError
from cpuserve.engine.process import DiedAtStart
from cpuserve.engine.replicas import RestartPolicy
from tests.engine.fake_replicas import PROMPT, first_of, with_fakes
from tests.helpers.patience import until


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
