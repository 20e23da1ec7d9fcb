"""A process that is started before its configuration is known."""

import asyncio
import gc
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from cpuserve.base.affinity import on_cpus
from cpuserve.base.errors import TooLittleMemory
from cpuserve.engine.launch import SpareProcess, start_process
from cpuserve.engine.process import ProcessClient
from tests.helpers.fake_executor import fake_config
from tests.helpers.patience import PATIENCE_S, until, wait_gone, wait_until

MODULE = "tests.helpers.fake_engine"


def children():
    return {child.pid for child in psutil.Process().children()}


def with_spare(body, **options):
    """Run `body(spare, the children before)`; nothing may be left at the end."""

    async def main():
        before, spare = children(), SpareProcess(set(), MODULE, **options)
        try:
            await body(spare, before)
        finally:
            spare.close()
        assert children() == before

    asyncio.run(main())


async def serve_from(spare):
    """Start an engine that may use the spare, and return its process id when it serves."""
    client = ProcessClient.spawn(fake_config(), module=MODULE, spare=spare)
    try:
        await client.wait_ready()
        return client.pid
    finally:
        await client.close()


def test_the_next_engine_uses_the_spare_process():
    async def body(spare, before):
        spare.start()
        spare.start()
        (started,) = children() - before
        assert await serve_from(spare) == started
        assert await serve_from(spare) not in before | {started}

    with_spare(body)


@pytest.mark.deep
def test_another_spare_starts_as_soon_as_one_is_taken_while_models_take_turns():
    async def body(spare, before):
        spare.keep = True
        spare.start()
        (first,) = children() - before
        assert await serve_from(spare) == first
        (second,) = children() - before
        assert second != first
        spare.close()
        assert await serve_from(spare) != second
        assert children() == before, "after the end, no other is kept"

    with_spare(body)


def test_too_little_memory_for_a_model_lets_another_spare_follow():
    async def body(spare, before):
        with spare.starting():
            (first,) = children() - before
        assert not spare.keep
        assert children() == before | {first}
        with suppress(TooLittleMemory), spare.starting():
            raise TooLittleMemory("full")
        assert spare.keep

    with_spare(body)


def test_a_spare_that_died_is_not_used():
    async def body(spare, before):
        spare.start()
        (started,) = children() - before
        psutil.Process(started).kill()
        wait_gone(started)
        assert spare.take(MODULE) is None
        spare.start()
        (another,) = children() - before
        assert another != started

    with_spare(body)


def test_a_spare_that_no_engine_uses_ends_after_a_time():
    async def body(spare, before):
        spare.start()
        assert spare.take("another.module") is None
        assert children() != before
        await until(lambda: children() == before)
        assert spare.take(MODULE) is None

    with_spare(body, longest_s=0.2)


def test_a_spare_that_the_system_refuses_is_no_error(monkeypatch):
    def refuse(*_, **__):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    async def body(spare, _before):
        monkeypatch.setattr("subprocess.Popen", refuse)
        gc.collect()  # else files of earlier tests may be closed meanwhile
        open_files = psutil.Process().num_fds()
        spare.start()
        assert spare.take(MODULE) is None
        assert psutil.Process().num_fds() == open_files

    with_spare(body)


def test_a_process_without_a_parent_ends():
    started = start_process(MODULE)
    started.sock.close()
    assert started.process.wait(PATIENCE_S) == 0
    started.kill()


def test_a_process_outlives_the_thread_that_started_it():
    """Its parent in the sense of PR_SET_PDEATHSIG is not the thread that asked for it."""
    found, ended = [], threading.Event()

    def ask():
        found.append(start_process(MODULE))
        wait_until(lambda: ignores(found[0].process.pid, signal.SIGTERM))
        ended.wait(0.3)  # by then it has set PR_SET_PDEATHSIG and waits for its configuration

    asked = threading.Thread(target=ask)
    asked.start()
    asked.join()
    try:
        assert not ended.wait(0.2)  # a signal would end it at once
        assert found[0].process.poll() is None
    finally:
        found[0].kill()


def ignores(pid, number):
    """Whether a process ignores a signal, as engines do just before they set PR_SET_PDEATHSIG."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("SigIgn:")[2].split()[0], 16) >> (number - 1) & 1


def test_a_process_may_use_the_cpus_of_the_thread_that_asked_for_it():
    one = {min(os.sched_getaffinity(0))}
    with on_cpus(one):
        started = start_process(MODULE)
    try:
        assert os.sched_getaffinity(started.process.pid) == one
    finally:
        started.kill()
