"""Aborts during a step: it ends early only if no remaining request needs its results."""

import asyncio
import queue
import threading
from array import array
from types import SimpleNamespace

import pytest

from cpuserve.base.errors import DeadlineExceeded
from cpuserve.engine.inline import InlineClient
from cpuserve.engine.interrupt import Interrupt
from cpuserve.engine.ipc import Abort, AddRequest, Shutdown
from cpuserve.engine.process import ProcessClient
from cpuserve.sampling.params import SamplingParams
from tests.helpers.fake_executor import fake_config, fake_core, reference
from tests.helpers.patience import PATIENCE_S

PROMPT = [11, 12, 13, 14, 15]


def requests(*ids):
    return [SimpleNamespace(id=number) for number in ids]


def interrupt():
    calls = []
    return Interrupt(calls.append), calls


def test_a_step_is_cancelled_once_when_its_last_request_is_aborted():
    made, calls = interrupt()
    made.begin(requests(1, 2))
    made.see(Abort([1]))
    assert calls == []
    made.see(Abort([7, 2]))
    made.see(Abort([2]))
    assert calls == [True]
    assert made.end() == "left"
    assert calls == [True, False]


def test_an_abort_between_inbox_and_step_ends_that_step():
    made, calls = interrupt()
    made.see(Abort([1]))
    assert calls == []
    made.begin(requests(1))
    assert calls == [True]
    assert made.end()


def test_handled_aborts_and_steps_that_are_over_cancel_nothing():
    made, calls = interrupt()
    made.see(Abort([1]))
    made.handled([1])
    made.begin(requests(1))
    assert not made.end()
    made.see(Abort([1]))
    made.begin([])
    assert not made.end()
    assert calls == []


def added(number, prompt=PROMPT):
    return AddRequest(number, array("i", prompt).tobytes(), SamplingParams(max_tokens=1), 0.0)


def test_a_step_ends_for_a_request_that_should_not_wait_and_only_once():
    made, calls = interrupt()
    made.begin(requests(1), lambda message: message.id == 3)
    made.see(added(2))
    assert calls == []
    made.see(added(3))
    made.see(added(3))
    made.see(Abort([1]))
    assert calls == [True]
    assert made.end() == "came"
    assert calls == [True, False]


def test_a_request_between_inbox_and_step_ends_that_step_until_the_engine_has_it():
    made, calls = interrupt()
    made.see(added(2))
    made.begin(requests(1), lambda message: True)
    assert calls == [True]
    assert made.end() == "came"
    made.added(2)
    made.begin(requests(1), lambda message: True)
    assert made.end() == ""


def test_core_ends_a_long_step_for_a_short_request_and_goes_on_where_it_was():
    config = fake_config(max_num_batched_tokens=64, itl_target_ms=50)
    core = fake_core(config, delay_s=0.0)
    prompt = [n % 7 for n in range(100)]
    add(core, 1, prompt, max_tokens=3)
    core.executor._delay_s = 60.0
    short = added(2)
    timer = threading.Timer(0.02, core.interrupt.see, [short])
    timer.start()
    assert core.step().outputs == []
    timer.join()
    core.executor._delay_s = 0.0
    core.handle(short)
    assert core.check() == {"ok": True}
    first = core.step().outputs
    assert [(o.id, o.finish) for o in first] == [(2, "length")]
    tokens = []
    while core.has_work:
        tokens += [token for o in core.step().outputs for token in o.tokens]
    assert tokens == reference(prompt, SamplingParams(), 1, 3)
    assert core.check() == {"ok": True}


def test_shutdown_ends_any_step():
    made, calls = interrupt()
    made.begin(requests(1, 2))
    made.see(AddRequest(3, b"", SamplingParams(), 0.0))
    made.see(Shutdown())
    assert calls == [True]


def add(core, number, prompt=PROMPT, **params):
    core.handle(
        AddRequest(number, array("i", prompt).tobytes(), SamplingParams(seed=1, **params), 0.0)
    )


def test_a_prompt_that_comes_during_a_step_is_hashed_by_the_thread_that_received_it():
    prompt, late = [n % 7 for n in range(40)], []

    def receive(_number, _outputs):
        if late:
            reader = threading.Thread(target=core.interrupt.see, args=(late[0],))
            reader.start()
            reader.join()

    core = fake_core(fake_config(max_num_batched_tokens=64, itl_target_ms=50), fault=receive)
    add(core, 1, prompt, max_tokens=1)
    while core.has_work:
        core.step()
    add(core, 2, max_tokens=2)
    late.append(added(3, prompt))
    hashed, digest = [], core.kv.index._digest
    core.kv.index._digest = lambda data: hashed.append(threading.get_ident()) or digest(data)
    core.step()
    core.handle(late.pop())
    reader = [thread for thread in hashed if thread != threading.get_ident()]
    assert len(reader) > 40 // core.config.block_size - 1, "the blocks and the root"
    hashed.clear()
    request = core.scheduler.requests[3]
    assert core.kv.num_cached_tokens(request.chain, request.token_ids) == 36
    assert not hashed, "the engine's thread has hashed them again"
    assert core.check() == {"ok": True}


def cancelled_step(core, *ids):
    """Run one step and abort `ids` while it runs."""
    message = Abort(list(ids))
    timer = threading.Timer(0.02, core.interrupt.see, [message])
    timer.start()
    output = core.step()
    timer.join()
    core.handle(message)
    return output


def test_core_forgets_a_cancelled_step_and_keeps_what_was_computed_before():
    core = fake_core(fake_config(max_num_batched_tokens=8), delay_s=0.0)
    prompt = list(range(30))
    add(core, 1, prompt, max_tokens=4)
    core.step()
    core.executor._delay_s = 60.0
    output = cancelled_step(core, 1)
    assert output.outputs == []
    assert (output.stats.running, output.stats.waiting, output.stats.steps) == (0, 0, 1)
    assert core.check() == {"ok": True}
    assert core.kv.num_free == core.kv.num_blocks
    assert core.kv.num_cached == 2  # the first eight tokens, in blocks of four
    assert not core.has_work
    core.executor._delay_s = 0.0
    add(core, 2, prompt, max_tokens=4)
    outputs = []
    while core.has_work:
        outputs += core.step().outputs
    assert outputs[0].cached_tokens == 8
    tokens = [token for output in outputs for token in output.tokens]
    assert tokens == reference(prompt, SamplingParams(), 1, 4)


def test_core_finishes_a_step_that_somebody_waits_for():
    core = fake_core(delay_s=0.1)
    add(core, 1, max_tokens=2)
    add(core, 2, [5, 6], max_tokens=2)
    output = cancelled_step(core, 1)
    assert {o.id for o in output.outputs} == {1, 2}
    assert len(core.step().outputs) == 1
    assert core.check() == {"ok": True}
    assert not core.has_work


def test_core_takes_the_results_of_a_step_that_was_done_before_the_cancel_came():
    core = fake_core()
    add(core, 1, max_tokens=3)
    step = core.executor.step

    def late(arrays):
        outputs = step(arrays)
        core.interrupt.see(Abort([1]))
        return outputs

    core.executor.step = late
    assert len(core.step().outputs) == 1
    core.executor.step = step
    core.handle(Abort([1]))
    add(core, 2, max_tokens=1)
    assert core.step().outputs[0].tokens == reference(PROMPT, SamplingParams(), 1, 1)


def test_process_ends_an_endless_step_when_its_reader_leaves():
    async def main():
        client = ProcessClient.spawn(
            fake_config(model="fake:endless"), module="tests.helpers.fake_engine"
        )
        try:
            await client.wait_ready()
            tasks = [
                asyncio.ensure_future(
                    anext(client.generate(AddRequest.of(PROMPT, SamplingParams())))
                )
                for _ in range(3)
            ]
            await asyncio.sleep(0.1)
            for task in tasks:
                task.cancel()
            report = await asyncio.wait_for(client.ask("report"), PATIENCE_S)
            assert (report["running"], report["waiting"]) == (0, 0)
            assert report["kv_blocks_free"] == 64
            assert await client.ask("check") == {"ok": True}
        finally:
            await asyncio.wait_for(client.close(), PATIENCE_S)
        assert client._process.returncode == 0

    asyncio.run(main())


def test_process_drops_a_request_when_its_time_is_over():
    async def main():
        client = ProcessClient.spawn(
            fake_config(model="fake:endless"), module="tests.helpers.fake_engine"
        )
        try:
            await client.wait_ready()
            stream = client.generate(AddRequest.of(PROMPT, SamplingParams()), timeout_s=0.1)
            with pytest.raises(DeadlineExceeded, match=r"timeout of 0\.1 s"):
                await asyncio.wait_for(anext(stream), PATIENCE_S)
            report = await asyncio.wait_for(client.ask("report"), PATIENCE_S)
            assert (report["running"], report["waiting"]) == (0, 0)
        finally:
            await client.close()

    asyncio.run(main())


def test_process_ends_an_endless_step_on_shutdown():
    async def main():
        client = ProcessClient.spawn(
            fake_config(model="fake:endless"), module="tests.helpers.fake_engine"
        )
        await client.wait_ready()
        task = asyncio.ensure_future(
            anext(client.generate(AddRequest.of(PROMPT, SamplingParams())))
        )
        await asyncio.sleep(0.1)
        await client.close()
        assert client._process.returncode == 0
        task.cancel()

    asyncio.run(main())


def test_inline_client_ends_an_endless_step_on_abort_and_on_shutdown():
    client = InlineClient(
        fake_config(), build=lambda config, _progress, _team: fake_core(config, delay_s=600.0)
    )
    client.start()
    sink = queue.SimpleQueue()
    number = client.submit(AddRequest.of(PROMPT, SamplingParams()), sink)
    client.abort([number])
    assert asyncio.run(asyncio.wait_for(client.ask("report"), PATIENCE_S))["running"] == 0
    client.submit(AddRequest.of(PROMPT, SamplingParams()), sink)
    client.shutdown()
    assert not client._thread.is_alive()
