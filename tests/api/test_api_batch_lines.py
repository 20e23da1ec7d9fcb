"""Lines of a batch while engines end: they wait, and only the line that ends engines is lost."""

import asyncio
import io
import json
import os
import signal
import subprocess
from collections import Counter

import httpx
import pytest

from cpuserve.api.app import create_app
from cpuserve.api.batches.line_runner import LineRunner
from cpuserve.api.batches.lines import BatchLine, read_lines
from cpuserve.api.request.state import ServerState
from cpuserve.base.errors import EngineDead, ServiceUnavailable
from cpuserve.engine.ipc import Output
from cpuserve.serving.callers.caller import Caller
from cpuserve.serving.callers.slots import TurnSlots
from cpuserve.serving.models.registry import ModelRegistry
from cpuserve.serving.threads import WORKS_FOR
from tests.api.fakes import FakeEngine, make_context, speak
from tests.helpers.patience import PATIENCE_S, until
from tests.helpers.served import running_server
from tests.helpers.tiny import tiny_model

URL = "/v1/completions"


def line(name, **body):
    body = {"prompt": "hi", **body}
    return json.dumps({"custom_id": name, "method": "POST", "url": URL, "body": body})


def run(*lines, script=speak, most=4, engine=None, **options):
    """Run lines with a scripted engine; return (status or error code, body) by custom_id."""
    results = {}
    data = io.BytesIO("\n".join(lines).encode())

    def take(result):
        told = result.response.status_code if result.response else result.error.code
        results[result.custom_id] = told

    async def main():
        client = engine or FakeEngine(script)
        app = create_app(ServerState(ModelRegistry(make_context(client))))
        sender = Caller.of_address("caller")
        runner = LineRunner(app, lambda: sender, "batch", **options)
        await runner.run(read_lines(data, (URL,), 10_000), take, most=most)

    asyncio.run(main())
    return results


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    """Wait less between two tries."""
    monkeypatch.setattr("cpuserve.api.batches.line_runner._FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr("cpuserve.api.batches.line_runner._LONGEST_PAUSE_S", 0.002)


def test_a_line_waits_for_a_restart_however_long_it_takes():
    tries = []

    def script(engine, number, prompt, params):
        tries.append(number)
        if len(tries) <= 40:
            yield EngineDead("it is being started again")
        yield Output(number, [70], "length")

    assert run(line("a"), script=script) == {"a": 200}
    assert len(tries) == 41


def test_a_line_waits_while_the_first_model_does_not_serve():
    class Restarting(FakeEngine):
        """An engine that does not serve for the first 100 times that it is asked."""

        asked_alive = 0

        @property
        def alive(self):
            self.asked_alive += 1
            return self.asked_alive > 100

        @alive.setter
        def alive(self, value):
            """The field of the parent class has a default."""

    engine = Restarting(speak)
    assert run(line("a"), line("b"), engine=engine) == {"a": 200, "b": 200}
    assert engine.asked_alive > 100


def test_a_line_that_ends_its_engine_each_time_fails_at_last():
    tries = []

    def script(engine, number, prompt, params):
        tries.append(number)
        yield EngineDead("killed", ran=True)

    assert run(line("a"), script=script) == {"a": 503}
    assert len(tries) == 6


def test_a_model_that_cannot_load_is_asked_for_at_its_own_pace(monkeypatch):
    tries, pauses, sleep = [], [], asyncio.sleep

    async def paused(seconds):
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr("cpuserve.api.batches.line_runner.asyncio.sleep", paused)

    def script(engine, number, prompt, params):
        tries.append(number)
        error = ServiceUnavailable("it cannot be loaded")
        error.retry_after_s = 30.0
        yield error

    assert run(line("a"), script=script) == {"a": 503}
    assert len(tries) == 6
    assert pauses == [30.0] * 5


def test_a_line_that_ends_engines_loses_no_other_line():
    death = [asyncio.Event()]

    def script(engine, number, prompt, params):
        mine = death[0]
        if params.max_tokens == 1:  # the line that ends the engine, with all that runs there
            yield 0.005
            mine.set()
            death[0] = asyncio.Event()
            yield EngineDead("a fault", ran=True)
        for _ in range(4):
            yield 0.004
            if mine.is_set():
                yield EngineDead("a fault", ran=True)
        yield Output(number, [70], "length")

    names = [f"good{number}" for number in range(30)]
    lines = [line(name, max_tokens=9) for name in names]
    lines.insert(2, line("bad", max_tokens=1))
    found = run(*lines, script=script)
    assert found == {"bad": 503} | dict.fromkeys(names, 200)


def test_a_line_that_waits_expires_with_its_batch():
    def script(engine, number, prompt, params):
        yield EngineDead("it is being started again")

    assert run(line("a"), script=script, until=0.0) == {"a": "batch_expired"}


@pytest.mark.deep
def test_three_kills_of_the_engine_lose_none_of_120_lines(tmp_path):
    names = [f"n{number}" for number in range(120)]
    data = "\n".join(line(name, model="tiny", max_tokens=100, ignore_eos=True) for name in names)
    # Few lines run at the same time, so most are left when this process sees the first ones end.
    options = ["--served-model-name", "tiny", "--files-dir", str(tmp_path), "--max-num-seqs", "4"]
    with (
        running_server(tiny_model("llama"), *options) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http,
    ):
        sent = http.post("/v1/files", files={"file": data}, data={"purpose": "batch"}).json()
        ask = {"input_file_id": sent["id"], "endpoint": URL, "completion_window": "24h"}
        batch = http.post("/v1/batches", json=ask).json()
        kills = 0
        while batch["status"] not in ("completed", "failed"):
            batch = http.get(f"/v1/batches/{batch['id']}").json()
            ended = sum(batch["request_counts"][kind] for kind in ("completed", "failed"))
            serves = http.get("/health").status_code == 200
            if kills < 3 and serves and ended >= 8 * (kills + 1):
                os.kill(engine_of(server.pid), signal.SIGKILL)
                kills += 1
        assert (kills, batch["request_counts"]) == (
            3,
            {"total": 120, "completed": 120, "failed": 0},
        )
        output = http.get(f"/v1/files/{batch['output_file_id']}/content").text
        assert Counter(json.loads(each)["custom_id"] for each in output.splitlines()) == Counter(
            names
        )


def engine_of(pid):
    """The process id of the engine of a server."""
    ask = ["pgrep", "-P", str(pid), "-f", "cpuserve.engine.child"]
    return int(subprocess.run(ask, capture_output=True, text=True, check=True).stdout.split()[0])


def test_lines_of_several_callers_take_turns_by_their_bytes(monkeypatch):
    slots, order, go = TurnSlots(3), [], asyncio.Event()

    async def main():
        async def app(scope, receive, send):
            body = (await receive())["body"]
            order.append(len(body))
            await go.wait()
            await send({"type": "http.response.start", "status": 200})
            await send({"type": "http.response.body", "body": b"{}"})

        async def run(caller, size):
            WORKS_FOR.set(caller)
            lines = [BatchLine(n, str(n), "/x", b"a" * size) for n in range(4)]
            runner = LineRunner(app, lambda: Caller.of_address(caller), caller, slots=slots)
            await runner.run(lines, lambda _: None, most=4)

        many = asyncio.create_task(run("greedy", 300))
        await until(lambda: order == [300, 300])
        # The lines of the greedy caller go on, and one of another caller begins.
        few = asyncio.create_task(run("modest", 100))
        await until(lambda: len(order) == 3)
        go.set()
        await asyncio.gather(many, few)

    asyncio.run(main())
    assert order[:3] == [300, 300, 100]
    assert sorted(order) == [100] * 4 + [300] * 4
