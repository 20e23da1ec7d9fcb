"""The engine in its own process: streams, aborts, and every way it can end."""

import asyncio
import gc
import os
import re
import signal
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path

import psutil
import pytest

from cpuserve.base.errors import EngineDead, InvalidRequest, StartupError
from cpuserve.engine import process
from cpuserve.engine.ipc import AddRequest
from cpuserve.engine.process import ProcessClient, _Link
from cpuserve.sampling.params import SamplingParams
from tests.helpers.children import child_options
from tests.helpers.depth import deep_but
from tests.helpers.fake_executor import fake_config, reference
from tests.helpers.patience import PATIENCE_S, wait_gone

PROMPT = [11, 12, 13, 14, 15]
MODULE = "tests.helpers.fake_engine"


def spawn(model="fake", **changes):
    return ProcessClient.spawn(fake_config(model=model, **changes), module=MODULE)


def with_engine(body, model="fake", **changes):
    """Run `body(client)` against a ready engine, and close it."""

    async def main():
        client = spawn(model, **changes)
        try:
            await client.wait_ready()
            return await asyncio.wait_for(body(client), PATIENCE_S)
        finally:
            await client.close()
            assert client._process.returncode is not None

    return asyncio.run(main())


async def collect(client, prompt=PROMPT, **params):
    """(tokens, last output) of one request."""
    tokens, last = [], None
    async for output in client.generate(
        AddRequest.of(prompt, SamplingParams(**{"seed": 1, **params}))
    ):
        tokens += output.tokens
        last = output
    return tokens, last


def test_process_serves_concurrent_requests_with_their_own_tokens():
    async def body(client):
        assert client.alive
        assert client.info["vocab_size"] == 1000
        prompts = [[n + 1] * (n + 2) for n in range(20)]
        results = await asyncio.gather(*(collect(client, p, max_tokens=15) for p in prompts))
        for prompt, (tokens, last) in zip(prompts, results, strict=True):
            assert tokens == reference(prompt, SamplingParams(), 1, 15, [9])
            assert last.finish == ("stop" if tokens[-1] == 9 else "length")
        assert client.stats.generation_tokens == sum(len(t) for t, _ in results)
        assert await client.ask("check") == {"ok": True}
        return (await client.ask("report"))["kv_blocks_free"]

    assert with_engine(body) == 64


def test_progress_is_reported_before_ready():
    async def main():
        seen = []
        client = ProcessClient.spawn(fake_config(), module=MODULE, on_progress=seen.append)
        assert not client.alive
        with pytest.raises(EngineDead, match="not ready"):
            client.generate(AddRequest.of(PROMPT, SamplingParams()))
        await asyncio.gather(client.wait_ready(), client.wait_ready())
        await client.close()
        assert (seen[-1].stage, seen[-1].done, seen[-1].total) == ("load", 100, 100)
        assert not client.alive
        await client.close()

    asyncio.run(main())


def test_request_that_cannot_run_is_refused_without_asking_the_engine():
    async def body(client):
        with pytest.raises(InvalidRequest, match="context length"):
            client.generate(AddRequest.of([1] * 200, SamplingParams()))
        params = SamplingParams()
        params.temperature = -1.0
        with pytest.raises(InvalidRequest, match="temperature"):
            client.generate(AddRequest.of(PROMPT, params))
        assert len((await collect(client, max_tokens=3))[0]) == 3

    with_engine(body)


@pytest.mark.parametrize("outputs", deep_but([1], [0, 1, 5]))
def test_closing_the_iterator_aborts_the_request(outputs):
    async def body(client):
        params = SamplingParams(max_tokens=150, seed=1)
        async with aclosing(client.generate(AddRequest.of(PROMPT, params))) as stream:
            for _ in range(outputs):
                await anext(stream)
        tokens, _ = await collect(client, max_tokens=2)
        assert len(tokens) == 2
        report = await client.ask("report")
        assert (report["running"], report["waiting"]) == (0, 0)
        assert report["kv_blocks_free"] == 64

    with_engine(body, "fake:slow")


def test_cancelling_the_reader_aborts_the_request():
    async def body(client):
        task = asyncio.create_task(collect(client, max_tokens=150))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while client.stats.running:
            await asyncio.sleep(0.01)
        assert (await client.ask("report"))["kv_blocks_free"] == 64

    with_engine(body, "fake:slow")


def test_slow_reader_does_not_hold_up_the_others():
    async def body(client):
        stream = client.generate(AddRequest.of(PROMPT, SamplingParams(max_tokens=100, seed=1)))
        first = await anext(stream)
        tokens, _ = await collect(client, [5], max_tokens=150)
        assert len(tokens) == 150
        rest = [o async for o in stream]
        assert len(first.tokens) + sum(len(o.tokens) for o in rest) == 100

    with_engine(body)


@pytest.mark.parametrize(
    ("model", "how"),
    [
        ("fake:slow", "was killed by SIGKILL (the system does that when memory runs out)"),
        (
            "fake:slow",
            "was killed by SIGBUS (the system does that when a file that is mapped was cut, such "
            "as packed weights): Fatal Python error: Bus error",
        ),
        ("fake:exit:4", "ended with exit code 7: going down with code 7"),
        pytest.param("fake:logs:4", "ended with exit code 7", marks=pytest.mark.deep),
        pytest.param(
            "fake:crash:4",
            "was killed by SIGSEGV: Fatal Python error: Segmentation fault",
            marks=pytest.mark.deep,
        ),
        ("fake:abort:4", "was killed by SIGABRT: free(): invalid pointer"),
    ],
    ids=["kill", "bus", "exit", "exit after a log", "segfault", "abort"],
)
def test_death_of_the_engine_ends_all_streams_and_says_how(model, how, capfd):
    async def body(client):
        tasks = [asyncio.create_task(collect(client, max_tokens=150)) for _ in range(3)]
        if model == "fake:slow":
            await asyncio.sleep(0.1)
            os.kill(client.pid, signal.SIGBUS if "SIGBUS" in how else signal.SIGKILL)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(r) for r in results] == [f"the engine {how}"] * 3, results
        assert all(isinstance(r, EngineDead) for r in results)
        assert not client.alive
        with pytest.raises(EngineDead, match=re.escape(how)):
            client.generate(AddRequest.of(PROMPT, SamplingParams()))
        with pytest.raises(EngineDead, match=re.escape(how)):
            await client.ask("report")

    with_engine(body, model)


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("subprocess.Popen", BlockingIOError(11, "Resource temporarily unavailable")),
        ("socket.socketpair", OSError(24, "Too many open files")),
        ("threading.Thread.start", RuntimeError("can't start new thread")),
    ],
    ids=["process", "files", "thread"],
)
def test_a_process_that_cannot_be_started_is_one_line_and_leaves_nothing(monkeypatch, place, error):
    def refuse(*_, **__):
        raise error

    gc.collect()  # else files of earlier tests may be closed meanwhile
    before, children = psutil.Process().num_fds(), psutil.Process().children()
    monkeypatch.setattr(place, refuse)
    with pytest.raises(StartupError, match=r"cannot be started: .*ulimit"):
        ProcessClient.spawn(fake_config(), module=MODULE)
    assert psutil.Process().num_fds() == before
    assert psutil.Process().children() == children


def test_a_closed_stderr_does_not_close_the_engines(monkeypatch):
    class Closed:
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr("cpuserve.base.log.sys.stderr", Closed())

    async def body(client):
        with pytest.raises(EngineDead, match="exit code 7: going down with code 7"):
            await collect(client, max_tokens=150)

    with_engine(body, "fake:exit:4")


def test_exception_in_a_step_ends_its_requests_and_the_process_lives(capfd):
    async def body(client):
        tokens, last = await collect(client, max_tokens=10)
        assert (last.finish, len(tokens)) == ("error", 2)
        assert "step goes wrong" in last.error
        assert len((await collect(client, max_tokens=4))[0]) == 4

    with_engine(body, "fake:raise:3")


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("fake:startup", "^the model is not there$"),
        ("fake:threads", r"^can't start new thread \(limits: ulimit -u"),
        pytest.param("fake:broken", "^ZeroDivisionError: a bug$", marks=pytest.mark.deep),
        pytest.param("fake:exit:0", None, marks=pytest.mark.deep),
    ],
    ids=["user error", "threads", "bug", "ready"],
)
def test_failure_to_start_is_one_line(model, text, capfd):
    async def main():
        client = spawn(model)
        try:
            if text is None:
                await client.wait_ready()
                return
            with pytest.raises(StartupError, match=text):
                await client.wait_ready()
            assert not client.alive
        finally:
            await client.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ("DEBUG", ["debug", "warning"]),
        pytest.param("INFO", ["warning"], marks=pytest.mark.deep),
        pytest.param("ERROR", [], marks=pytest.mark.deep),
    ],
)
def test_the_engine_logs_at_the_level_of_the_process_that_starts_it(level, shown, caplog, capfd):
    with caplog.at_level(level, "cpuserve"):
        client = spawn()
        asyncio.run(ready_and_close(client))
    lines = capfd.readouterr().err
    seen = [kind for kind in ("debug", "warning") if kind.upper() in lines]
    assert seen == shown


async def ready_and_close(client):
    await client.wait_ready()
    await client.close()


def test_death_while_loading_is_a_startup_error():
    async def main():
        client = spawn("fake:hang")
        asyncio.get_running_loop().call_later(0.2, os.kill, client.pid, signal.SIGKILL)
        with pytest.raises(StartupError, match=r"did not start: .*SIGKILL"):
            await asyncio.wait_for(client.wait_ready(), PATIENCE_S)
        await client.close()

    asyncio.run(main())


def test_close_while_loading_does_not_wait_for_the_load():
    async def main():
        client = spawn("fake:hang")
        waiting = asyncio.create_task(client.wait_ready())
        await asyncio.sleep(0.1)
        await asyncio.wait_for(client.close(), PATIENCE_S)
        with pytest.raises(StartupError):
            await waiting

    asyncio.run(main())


def test_close_with_requests_running_ends_them_and_the_process():
    async def main():
        client = spawn("fake:slow")
        await client.wait_ready()
        task = asyncio.create_task(collect(client, max_tokens=150))
        await asyncio.sleep(0.1)
        await client.close()
        with pytest.raises(EngineDead, match="the server is shutting down"):
            await task
        assert client._process.returncode == 0

    asyncio.run(main())


def test_kill_without_an_event_loop_reaps_the_process():
    client = spawn("fake:hang")
    client.kill()
    assert client._process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("way", ["close", "kill"])
def test_an_engine_that_a_stuck_disk_keeps_from_ending_is_left_to_the_system(
    way, monkeypatch, caplog
):
    monkeypatch.setattr(process, "EXIT_WAIT_S", 0.05)
    monkeypatch.setattr(process, "KILL_WAIT_S", 0.05)
    client = spawn()
    end = client._process.kill
    monkeypatch.setattr(client._process, "kill", lambda: None)

    async def close():
        await client.wait_ready()
        client._process.send_signal(signal.SIGSTOP)
        await asyncio.wait_for(client.close(), PATIENCE_S)

    try:
        if way == "close":
            asyncio.run(close())
            assert "was killed and has not ended" in caplog.text
        else:
            client._process.send_signal(signal.SIGSTOP)
            client.kill()
        assert client._process.poll() is None
    finally:
        end()
        client._process.wait()
        client._stderr._thread.join()


def test_ctrl_c_and_sigterm_are_left_to_the_parent():
    async def body(client):
        os.kill(client.pid, signal.SIGINT)
        os.kill(client.pid, signal.SIGTERM)
        assert len((await collect(client, max_tokens=5))[0]) == 5

    with_engine(body)


def test_idle_engine_sleeps_until_a_request_comes():
    async def body(client):
        await collect(client, max_tokens=5)
        before = "", -1
        # On a busy machine it may fall asleep late, and wait for a CPU meanwhile (state R).
        while (found := wake_ups(client.pid)) != before or found[0] != "S":
            before = found
            await asyncio.sleep(0.3)
        await collect(client, max_tokens=5)
        assert wake_ups(client.pid)[1] > before[1]

    with_engine(body)


def wake_ups(pid):
    """Return (state, number of context switches); equal values mean that it slept meanwhile."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    switches = ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
    return status["State"].split()[0], sum(int(status[name]) for name in switches)


PARENT = """
import asyncio, os
from cpuserve.engine.ipc import AddRequest
from cpuserve.engine.process import ProcessClient
from cpuserve.sampling.params import SamplingParams
from tests.helpers.fake_executor import fake_config

async def main():
    client = ProcessClient.spawn(fake_config(model={model!r}), module="tests.helpers.fake_engine")
    if {model!r} != "fake:hang":
        await client.wait_ready()
    print(client.pid, flush=True)
    if {model!r} == "fake:slow":
        async for _ in client.generate(AddRequest.of([1, 2], SamplingParams(max_tokens=150))):
            pass
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("model", deep_but(["fake:hang"], ["fake", "fake:slow", "fake:hang"]))
def test_engine_ends_when_its_parent_is_killed(model):
    code = PARENT.replace("{model!r}", repr(model))
    with subprocess.Popen(
        [sys.executable, "-c", code],
        **child_options(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as parent:
        pid = int(parent.stdout.readline())
        parent.kill()
        wait_gone(pid)


def test_eof_alone_ends_an_idle_engine():
    async def main():
        client = spawn()
        await client.wait_ready()
        client._link.close()
        await asyncio.to_thread(wait_gone, client.pid)
        await client.close()
        assert client._process.returncode == 0

    asyncio.run(main())


def test_requests_that_wait_for_room_go_one_by_one():
    async def main():
        link, sent = _Link(None), []
        link.pause_writing()

        async def send(number):
            await link.wait_writable()
            sent.append(number)
            link.pause_writing()  # the first message has filled the buffer again

        waiting = [asyncio.create_task(send(number)) for number in range(3)]
        for count in (1, 2, 3):
            await asyncio.sleep(0)
            link.resume_writing()
            for _ in range(5):
                await asyncio.sleep(0)
            assert sent == list(range(count))
        await asyncio.gather(*waiting)

    asyncio.run(main())


def test_front_end_side_imports_no_numpy():
    code = (
        "import sys, cpuserve.engine.process, "
        "cpuserve.serving.generation.text; print([m for m in ('numpy', 'torch', 'transformers') "
        "if m in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, **child_options(), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
