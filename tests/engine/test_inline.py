"""The engine on a thread: its synchronous side, its asynchronous side, and its end."""

import asyncio
import gc
import queue
import threading
import weakref
from contextlib import aclosing

import pytest

from cpuserve.base.errors import EngineDead, InvalidRequest, ModelError, StartupError
from cpuserve.engine.inline import InlineClient
from cpuserve.engine.ipc import AddRequest
from cpuserve.sampling.params import SamplingParams
from tests.helpers.fake_executor import fake_config, fake_core, reference
from tests.helpers.patience import PATIENCE_S

PROMPT = [11, 12, 13]


def build(config, progress, team, **options):
    progress("load", 1, 1)
    return fake_core(config, **options)


@pytest.fixture
def client():
    made = InlineClient(fake_config(), build=build)
    made.start()
    yield made
    made.shutdown()
    assert not made._thread.is_alive()


def params(**changes):
    return SamplingParams(**{"seed": 1, "max_tokens": 10, **changes})


def test_submit_delivers_outputs_of_several_requests_to_one_sink(client):
    sink = queue.SimpleQueue()
    asked = [AddRequest.of([n + 1] * 5, params()) for n in range(12)]
    prompts = {client.submit(each, sink): each.prompt_ids for each in asked}
    tokens, left = {number: [] for number in prompts}, set(prompts)
    while left:
        output = sink.get(timeout=PATIENCE_S)
        tokens[output.id] += output.tokens
        if output.finish:
            left.remove(output.id)
    for number, prompt in prompts.items():
        assert tokens[number] == reference(prompt, params(), 1, 10)
    assert client.stats.generation_tokens == 120


def test_what_is_submitted_together_waits_for_the_last_and_shares_steps(client):
    sink = queue.SimpleQueue()
    with client.together():
        numbers = {
            client.submit(AddRequest.of([n + 1] * 5, params(max_tokens=1)), sink) for n in range(6)
        }
        with pytest.raises(queue.Empty):
            sink.get(timeout=0.05)
    assert {sink.get(timeout=PATIENCE_S).id for _ in numbers} == numbers
    assert client.stats.steps == 1


def test_submit_of_a_request_that_cannot_run_is_refused(client):
    with pytest.raises(InvalidRequest, match="empty"):
        client.submit(AddRequest.of([], params()), queue.SimpleQueue())


def test_abort_stops_the_outputs_and_frees_the_blocks(client):
    sink = queue.SimpleQueue()
    number = client.submit(AddRequest.of(PROMPT, params(max_tokens=190)), sink)
    sink.get(timeout=PATIENCE_S)
    client.abort([number])
    report = asyncio.run(client.ask("report"))
    assert report["kv_blocks_free"] == 64
    assert asyncio.run(client.ask("check")) == {"ok": True}


def test_generate_streams_and_aborts_on_close_in_any_event_loop(client):
    async def body():
        await client.wait_ready()
        async with aclosing(
            client.generate(AddRequest.of(PROMPT, params(max_tokens=190)))
        ) as stream:
            await anext(stream)
        tokens = [
            t async for o in client.generate(AddRequest.of(PROMPT, params())) for t in o.tokens
        ]
        assert tokens == reference(PROMPT, params(), 1, 10)
        return (await client.ask("report"))["running"]

    assert asyncio.run(body()) == 0
    assert asyncio.run(body()) == 0


def test_failure_to_build_is_a_startup_error_for_everybody():
    def fail(config, progress, team):
        msg = "no such model"
        raise ModelError(msg)

    client = InlineClient(fake_config(), build=fail)
    with pytest.raises(ModelError, match="no such model"):
        client.start()
    with pytest.raises(ModelError, match="no such model"):
        asyncio.run(client.wait_ready())
    with pytest.raises(EngineDead, match="no such model"):
        client.submit(AddRequest.of(PROMPT, params()), queue.SimpleQueue())
    assert not client.alive


def test_bug_while_building_is_a_startup_error_that_names_it():
    client = InlineClient(fake_config(), build=lambda *_: 1 / 0)
    with pytest.raises(StartupError, match="ZeroDivisionError"):
        client.start()


def test_death_of_the_engine_thread_reaches_everybody_who_waits(caplog):
    cores = []

    def remember(config, progress, team):
        cores.append(build(config, progress, team))
        return cores[0]

    client = InlineClient(fake_config(), build=remember)
    client.start()

    async def body():
        cores[0].scheduler.update = None  # a bug outside of the executor
        with pytest.raises(EngineDead, match="TypeError"):
            async for _ in client.generate(AddRequest.of(PROMPT, params())):
                pass
        assert not client.alive
        with pytest.raises(EngineDead):
            await client.ask("report")

    asyncio.run(body())
    assert cores[0].executor.closed


def test_an_engine_that_dies_between_two_checks_of_a_request_ends_that_request(monkeypatch):
    client = InlineClient(fake_config(), build=build)
    client.start()
    admit = client._admission.admit

    def admit_while_it_dies(*args):
        """The engine is alive when the request is checked and dead before it is registered."""
        client._router.fail("the engine ended with a bug")
        return admit(*args)

    monkeypatch.setattr(client._admission, "admit", admit_while_it_dies)

    async def body():
        async for _ in client.generate(AddRequest.of(PROMPT, params())):
            pass

    try:
        with pytest.raises(EngineDead, match="a bug"):
            asyncio.run(asyncio.wait_for(body(), PATIENCE_S))
    finally:
        client.shutdown()


def test_shutdown_ends_the_requests_and_closes_the_executor():
    cores = []

    def remember(config, progress, team):
        cores.append(build(config, progress, team, delay_s=0.01))
        return cores[0]

    client = InlineClient(fake_config(), build=remember)
    client.start()
    sink = queue.SimpleQueue()
    client.submit(AddRequest.of(PROMPT, params(max_tokens=190)), sink)
    sink.get(timeout=PATIENCE_S)
    client.shutdown()
    assert cores[0].executor.closed
    items = []
    while not sink.empty():
        items.append(sink.get())
    assert isinstance(items[-1], EngineDead)
    with pytest.raises(EngineDead):
        client.submit(AddRequest.of(PROMPT, params()), sink)


def test_dropped_client_ends_its_thread():
    client = InlineClient(fake_config(), build=build)
    client.start()
    thread, gone = client._thread, weakref.ref(client)
    assert thread in threading.enumerate()
    del client
    gc.collect()
    assert gone() is None
    assert not thread.is_alive()
