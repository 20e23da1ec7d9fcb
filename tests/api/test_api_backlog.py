"""The backlog: limits on waiting sequences, estimates of their wait, and rejected requests."""

import asyncio

import httpx
import pytest

from cpuserve.base.errors import TooManyRequests
from cpuserve.engine.ipc import Output, Stats
from cpuserve.sampling.params import SamplingParams
from cpuserve.serving.calls.call import GenerateCall, Prompt
from cpuserve.serving.generation.fan_out import admit, dismiss, start
from cpuserve.serving.generation.generate import Generation
from cpuserve.serving.generation.plan import SequencePlan
from cpuserve.serving.models.limits import LONGEST_RETRY_S, Backlog, ClientLimits
from tests.api.fakes import Api, error_of


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def make(max_requests=10, max_tokens=1000, rate=0.0, slots=1):
    clock = Clock()
    return Backlog(max_requests, max_tokens, lambda: rate, clock, slots), clock


def test_no_more_sequences_may_wait_once_a_limit_is_reached():
    backlog, _ = make()
    for _ in range(10):
        backlog.check()
        backlog.enter(10)
    with pytest.raises(TooManyRequests, match=r"10 requests are waiting .* limit is 10\."):
        backlog.check()
    backlog.leave(10)
    backlog.check()
    backlog.leave(10)
    backlog.enter(920)
    with pytest.raises(TooManyRequests, match=r"1000 prompt tokens are waiting .* limit is 1000\."):
        backlog.check()


def test_a_caller_below_its_share_is_admitted_while_others_fill_the_backlog():
    backlog, _ = make()
    for _ in range(10):
        backlog.check(caller="a")
        backlog.enter(10, "a")
    for _ in range(5):  # half of the limit, because two callers wait
        backlog.check(caller="b")
        backlog.enter(10, "b")
    for caller in ("a", "b", ""):
        with pytest.raises(TooManyRequests, match="15 requests are waiting"):
            backlog.check(caller=caller)
    backlog.check(caller="c")
    for _ in range(10):
        backlog.leave(10, "a")
    assert backlog.requests == 5
    backlog.check(caller="a")


def test_a_caller_waits_for_its_share_of_the_queue_and_not_for_all_of_another():
    backlog, _ = make(max_tokens=100_000, rate=100.0)
    for _ in range(8):
        backlog.enter(1000, "a")
    assert backlog.wait_s() == backlog.wait_s("a") == pytest.approx(80.0)
    assert backlog.wait_s("b") == 0.0
    backlog.check(5.0, "b")
    with pytest.raises(TooManyRequests, match="estimated wait for the first token is 80 s"):
        backlog.check(5.0, "a")
    backlog.enter(1000, "b")
    assert backlog.wait_s("b") == pytest.approx(20.0)  # its own request, and one of "a"


def test_the_share_is_of_prompt_tokens_as_well_and_ends_at_twice_the_limit():
    backlog, _ = make()
    backlog.enter(1000, "a")
    backlog.check(caller="b")
    backlog.enter(500, "b")
    with pytest.raises(TooManyRequests, match="1500 prompt tokens are waiting"):
        backlog.check(caller="b")
    backlog.enter(500, "c")
    with pytest.raises(TooManyRequests, match="2000 prompt tokens are waiting"):
        backlog.check(caller="d")


@pytest.mark.parametrize(("n", "size"), [(1, 120), (8, 5), (8, 60)])
def test_request_larger_than_the_bounds_is_answered_while_another_waits(n, size):
    api = Api(http=ClientLimits(max_queued_requests=5, max_queued_tokens=100))
    api.context.backlog.enter(10)
    answer = api.complete([5] * size, n=n, max_tokens=1)
    assert (answer.status_code, len(answer.json()["choices"])) == (200, n)


def test_prompt_that_several_sequences_share_is_counted_once():
    context = Api().context
    params = SamplingParams(max_tokens=1)
    prompts = [Prompt([5] * 20), Prompt([5] * 30)]
    sequences = [SequencePlan(index, prompts[index // 4], params, 4) for index in range(8)]
    admit(context, sequences)
    backlog = context.backlog
    assert (backlog.requests, backlog.tokens) == (8, 50)
    start(context, sequences[0], 0)
    dismiss(context, sequences[0])
    assert (backlog.requests, backlog.tokens) == (7, 30)
    for sequence in sequences:
        dismiss(context, sequence)
    assert (backlog.requests, backlog.tokens, context.active_sequences) == (0, 0, 0)


def test_wait_is_the_waiting_prompt_tokens_divided_by_the_prompt_rate():
    backlog, _ = make(max_requests=4, rate=100.0)
    assert backlog.wait_s() == 0.0
    for _ in range(4):
        backlog.enter(200)
    assert backlog.wait_s() == pytest.approx(8.0)
    with pytest.raises(TooManyRequests) as error:
        backlog.check()
    assert error.value.retry_after_s == pytest.approx(8.0)


def test_wait_excludes_tokens_that_are_probably_in_the_prefix_cache():
    backlog, _ = make(max_tokens=10**6, rate=100.0)
    for _ in range(100):
        backlog.enter(4000)
        backlog.start(4000, 40)
    for _ in range(5):
        backlog.enter(4000)
    assert backlog.wait_s() == pytest.approx(5 * 40 / 100.0, rel=0.6)
    backlog.check(30.0)
    for _ in range(100):
        backlog.enter(4000)
        backlog.start(4000, 4000)
    assert backlog.wait_s() == pytest.approx(5 * 4000 / 100.0, rel=0.2)


def test_slots_taken_together_come_free_together():
    # 64 answers of one minute start within 6 s: sequences that arrive then wait at most a minute.
    backlog, clock = make(max_requests=100, slots=64)
    for _ in range(64):
        backlog.enter(10)
    for _ in range(64):
        clock.now += 0.1
        backlog.start(10, 10)
    for waiting in range(1, 9):
        backlog.enter(10)
        clock.now += 5
        assert backlog.wait_s() == pytest.approx(5 * waiting, abs=1)
    backlog.check(60.0)


def test_sequences_that_share_a_prompt_do_not_make_others_look_longer():
    backlog, _ = make(max_tokens=10**6, rate=100.0)
    for _ in range(1000):
        backlog.enter(31)
        backlog.start(31, 31)
        for _ in range(7):
            backlog.enter(0)
            backlog.start(0, 31)
    backlog.enter(1000)
    assert backlog.wait_s() == pytest.approx(10.0)


def test_one_short_hit_does_not_promise_that_all_is_cached():
    backlog, _ = make(rate=100.0)
    backlog.enter(16)
    backlog.start(16, 1)
    backlog.enter(1000)
    assert backlog.wait_s() == pytest.approx(10.0, rel=0.01)


def test_second_turns_are_not_refused_for_the_tokens_of_their_first():
    def hit(engine, number, prompt, params):
        yield Output(number, [5], "length", cached_tokens=len(prompt) - 1)

    api = Api(hit)
    for _ in range(200):
        assert api.complete([5] * 100, max_tokens=1).status_code == 200
    api.engine.stats = Stats(prompt_rate=10.0)
    api.context.backlog.enter(1000)
    assert api.complete([5] * 100, max_tokens=1, timeout=50).status_code == 200


def test_a_request_whose_timeout_is_shorter_than_the_wait_is_refused_immediately():
    backlog, _ = make(rate=100.0)
    backlog.check(0.1)
    backlog.enter(500)
    backlog.check(6.0)
    with pytest.raises(TooManyRequests, match=r"wait for .* is 5 s, .* timeout of 3 s") as error:
        backlog.check(3.0)
    assert error.value.retry_after_s == pytest.approx(5.0)


def test_wait_follows_the_pace_of_starts_while_all_slots_are_taken():
    backlog, clock = make(rate=1e6)
    for _ in range(8):
        backlog.enter(10)
    for _ in range(4):
        clock.now += 3.0
        backlog.start(10, 10)
    assert backlog.wait_s() == pytest.approx(4 * 3.0)


def test_idle_time_is_not_taken_for_a_slow_pace():
    backlog, clock = make()
    for _ in range(3):
        backlog.enter(10)
    for _ in range(3):
        backlog.start(10, 10)
        clock.now += 0.5
    clock.now += 3600.0
    for _ in range(3):
        backlog.enter(10)
    backlog.start(10, 10)
    clock.now += 0.5
    backlog.start(10, 10)
    assert backlog.wait_s() == pytest.approx(0.5)


def test_measured_pace_is_forgotten_when_the_backlog_is_empty():
    backlog, clock = make()
    for _ in range(3):
        backlog.enter(10)
    for _ in range(3):
        clock.now += 60.0
        backlog.start(10, 10)
    backlog.enter(10)
    backlog.check(30.0)
    assert backlog.wait_s() == 0.0


def test_wait_grows_while_nobody_starts_and_no_prompt_explains_it():
    backlog, clock = make(rate=100.0)
    for _ in range(9):
        backlog.enter(20)
    backlog.start(20, 20)
    clock.now += 0.1
    backlog.start(20, 20)
    for _ in range(2):
        backlog.enter(20)
    clock.now += 20.0
    with pytest.raises(TooManyRequests, match="timeout of 30 s") as error:
        backlog.check(30.0)
    assert error.value.retry_after_s == pytest.approx(9 * (20.0 - 1.8))


def test_silence_while_a_long_prompt_is_computed_is_not_counted_once_for_each_that_waits():
    backlog, clock = make(max_tokens=10**6, rate=100.0)
    backlog.enter(6000)
    for _ in range(5):
        backlog.enter(20)
    clock.now += 40.0
    assert backlog.wait_s() == pytest.approx(61.0)


def test_clients_that_disconnect_do_not_change_the_pace():
    backlog, clock = make(max_requests=100)
    for _ in range(60):
        backlog.enter(10)
    for _ in range(3):
        clock.now += 4.0
        backlog.start(10, 10)
    before = backlog.wait_s() / backlog.requests
    for _ in range(50):
        backlog.leave(10)
    assert backlog.wait_s() == pytest.approx(before * backlog.requests)


def test_retry_after_is_between_a_second_and_ten_minutes():
    for rate, want in ((1e9, 1.0), (1e-3, LONGEST_RETRY_S), (0.0, 1.0)):
        backlog, _ = make(max_requests=1, rate=rate)
        backlog.enter(100)
        with pytest.raises(TooManyRequests) as error:
            backlog.check()
        assert error.value.retry_after_s == want


def test_request_that_ends_without_an_output_does_not_change_the_pace():
    gate = asyncio.Event()

    def gated(engine, number, prompt, params):
        yield gate
        yield Output(number, [5], "length")

    context = Api(gated).context
    context.backlog, clock = make()

    async def ask():
        sequence = SequencePlan(0, Prompt([5, 6]), SamplingParams(max_tokens=1), 1)
        return [
            events async for events in Generation(context, GenerateCall(), [sequence], 2).events()
        ]

    async def hang_up():
        tasks = [asyncio.create_task(ask()) for _ in range(8)]
        await asyncio.sleep(0)
        clock.now += 5.0
        for task in tasks[:6]:
            task.cancel()
        await asyncio.wait(tasks[:6])
        waits = context.backlog.requests, context.backlog.wait_s()
        gate.set()
        await asyncio.gather(*tasks[6:])
        return waits

    assert asyncio.run(hang_up()) == (2, 2 * 5.0)
    assert context.backlog.requests == 0


def test_fanned_out_requests_of_one_moment_see_each_other_and_leave_nothing_behind():
    def never(engine, number, prompt, params):
        yield asyncio.Event()

    context = Api(never, http=ClientLimits(max_queued_requests=3)).context

    async def ask():
        params = SamplingParams(max_tokens=1)
        sequences = [SequencePlan(index, Prompt([5, 6]), params, 3) for index in range(3)]
        return [
            events async for events in Generation(context, GenerateCall(), sequences, 6).events()
        ]

    async def at_once():
        tasks = [asyncio.create_task(ask()) for _ in range(4)]
        await asyncio.sleep(0)
        held = context.active_sequences, context.backlog.requests, context.backlog.tokens
        for task in tasks:  # before the tasks of their sequences have started
            task.cancel()
        return held, await asyncio.gather(*tasks, return_exceptions=True)

    held, ends = asyncio.run(at_once())
    assert held == (3, 3, 6)
    assert [type(end) for end in ends[1:]] == [TooManyRequests] * 3
    backlog = context.backlog
    assert (backlog.requests, backlog.tokens, context.active_sequences) == (0, 0, 0)


def test_of_many_requests_each_is_answered_or_gets_429_with_retry_after():
    gate = asyncio.Event()

    def gated(engine, number, prompt, params):
        yield gate
        yield Output(number, [5], None)
        yield Output(number, [5], "length")

    api = Api(gated, http=ClientLimits(max_queued_requests=20))
    api.engine.stats = Stats(prompt_rate=2.0)
    body = {"prompt": [5, 6, 7], "max_tokens": 2, "model": "tiny"}

    async def crowd():
        transport = httpx.ASGITransport(app=api.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            asked = [
                asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(200)
            ]
            while len(api.engine.asked) < 20 or sum(t.done() for t in asked) < 180:
                await asyncio.sleep(0.01)
            assert api.context.backlog.requests == 20
            gate.set()
            return await asyncio.gather(*asked)

    answers = asyncio.run(crowd())
    codes = [a.status_code for a in answers]
    assert (codes.count(200), codes.count(429)) == (20, 180)
    refused = next(a for a in answers if a.status_code == 429)
    assert error_of(refused)["type"] == "TooManyRequests"
    assert int(refused.headers["retry-after"]) == 30  # 20 prompts of 3 tokens at 2 tokens/s
    backlog = api.context.backlog
    assert (backlog.requests, backlog.tokens, api.context.active_sequences) == (0, 0, 0)


@pytest.mark.parametrize("cached", [[0, 4], [4, 4]])
def test_usage_has_what_every_sequence_of_the_prompt_found(cached):
    def speak(engine, number, prompt, params):
        yield Output(number, [5], "length", cached_tokens=cached[number])

    body = Api(speak).complete([5, 6, 7, 8, 9], n=2, max_tokens=1).json()
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": min(cached)}
