"""Every background task of a real front end: it fails once, which is told, and runs again."""

import asyncio
import os
import signal
import socket
from collections import Counter

import httpx
import pytest

from cpuserve.api.lifecycle.front_end import FrontEnd
from cpuserve.base import background
from cpuserve.base.background import Pauses, keep, troubles
from cpuserve.config.server import ServerOptions
from cpuserve.engine.replicas import ReplicaClient
from cpuserve.platforms.cpu import CpuPlatform
from cpuserve.serving.models.recent_prompts import PromptShape, RecentPrompt, bytes_of
from tests.helpers.fake_executor import fake_config
from tests.helpers.patience import PATIENCE_S, until
from tests.helpers.tiny import tiny_model
from tests.meta.test_background import kept_names


class Sleeper:
    """Sleeps as the engines of the first model do, without ending them."""

    async def sleep(self):
        """Do nothing."""

    async def wake(self, context, promised_bytes):
        """Do nothing."""

    async def rest(self, context):
        """Do nothing."""


class Broken:
    """Breaks the first run of the work of each background task."""

    def __init__(self, monkeypatch):
        self.runs = Counter()
        self._keep = background._keep
        monkeypatch.setattr(background, "_keep", self)

    def __call__(self, name, work, _):
        async def faulty():
            self.runs[name] += 1
            if self.runs[name] == 1:
                msg = "broken on purpose"
                raise ValueError(msg)
            return await work()

        return self._keep(name, faulty, Pauses(first_s=0.02, longest_s=0.02, steady_s=2))


def response():
    """A prompt with its response, which the next start may find."""
    ids = bytes_of(range(200))
    return RecentPrompt("me", ("", 1.0, ""), "text", ids, PromptShape(chat=True), num_prompt=100)


def front_end_of(place):
    """A front end with batches over a process of a fake engine, which sleeps at once when idle."""
    model = str(tiny_model("llama"))
    config = fake_config(
        model_path=model,
        tokenizer_path=model,
        served_model_names=["fake"],
        prefix_cache_dir=str(place / "cache"),
        prefix_cache_bytes=1 << 20,
    )
    client = ReplicaClient.spawn([fake_config(model="fake")], module="tests.helpers.fake_engine")
    options = ServerOptions(files_dir=str(place), keep_alive=0.1, allowed_hosts=("*",))
    return client, FrontEnd(client, [config], options, "", CpuPlatform(), sleeper=Sleeper())


def test_each_background_task_is_told_when_it_fails_and_runs_again(tmp_path, monkeypatch, caplog):
    broken, shown, told = Broken(monkeypatch), [], set()
    names = kept_names()

    async def on_ready(url, client):
        shown.append(url)

    async def main():
        client, front_end = front_end_of(tmp_path)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            running = asyncio.create_task(front_end.run(listener, on_ready))
            async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
                await until(lambda: told.update(troubles()) or shown or running.done())
                assert not running.done(), running.result()
                degraded = (await http.get("/health")).json()
                assert degraded["status"] == "degraded"
                assert degraded["reasons"]["running batches"] == "ValueError"
                front_end.context.kept.put(response())
                os.kill(client._replicas[0].engine.pid, signal.SIGKILL)
                while set(broken.runs) != names or min(broken.runs.values()) < 2:
                    told.update(troubles())
                    await asyncio.sleep(0.005)
                assert told == names
                while (await http.get("/health")).content:
                    await asyncio.sleep(0.02)
            front_end._on_signal(signal.SIGTERM)
            assert await running == 0
        front_end.state.batches.directory.close()

    asyncio.run(main())
    for name in names:
        assert f"{name} failed (broken on purpose) and starts again" in caplog.text
    assert troubles() == {}


def test_a_task_that_goes_on_failing_waits_longer_each_time(caplog):
    pauses, starts = Pauses(first_s=0.01, longest_s=0.04, steady_s=9), []

    async def fails():
        starts.append(None)
        msg = "always"
        raise ValueError(msg)

    async def main():
        task = keep("a task", fails, pauses)
        await until(lambda: len(starts) == 6)
        assert troubles() == {"a task": "ValueError"}
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert troubles() == {}

    asyncio.run(main())
    told = [record.message.rpartition("again in ")[2] for record in caplog.records]
    assert told[:5] == ["0.01 s", "0.02 s", "0.04 s", "0.04 s", "0.04 s"]
