"""The backlog: what may wait for a first token, and what a refused client is told."""

import asyncio

import httpx
import pytest

from cpuserve.engine.ipc import Output, Stats
from cpuserve.entrypoints.openai.backlog import LONGEST_RETRY_S, Backlog
from cpuserve.entrypoints.openai.serving import HttpLimits
from cpuserve.errors import TooManyRequests
from tests.api.fakes import Api, error_of


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def make(max_requests=10, max_tokens=1000, rate=0.0):
    clock = Clock()
    return Backlog(max_requests, max_tokens, lambda: rate, clock), clock


def test_empty_backlog_takes_anything_and_a_full_one_nothing():
    backlog, _ = make()
    backlog.check(5000, 10**6)
    for _ in range(10):
        backlog.check(1, 10)
        backlog.enter(10)
    with pytest.raises(TooManyRequests, match="10 requests are waiting"):
        backlog.check(1, 1)
    backlog.leave(10)
    backlog.check(1, 910)
    with pytest.raises(TooManyRequests, match="90 prompt tokens are waiting"):
        backlog.check(1, 911)


def test_wait_is_the_prompts_before_at_their_rate():
    backlog, _ = make(rate=100.0)
    assert backlog.wait_s() == 0.0
    for _ in range(4):
        backlog.enter(200)
    assert backlog.wait_s() == pytest.approx(8.0)
    with pytest.raises(TooManyRequests) as error:
        backlog.check(7, 1)
    assert error.value.retry_after_s == pytest.approx(8.0)


def test_a_timeout_shorter_than_the_wait_is_refused_at_the_door():
    backlog, _ = make(rate=100.0)
    backlog.check(1, 10, 0.1)
    backlog.enter(500)
    backlog.check(1, 10, 6.0)
    with pytest.raises(TooManyRequests, match=r"about 5 s of work .* timeout of 3 s") as error:
        backlog.check(1, 10, 3.0)
    assert error.value.retry_after_s == pytest.approx(5.0)


def test_wait_is_the_pace_of_leaving_where_slots_are_what_lacks():
    backlog, clock = make(rate=1e6)
    for _ in range(8):
        backlog.enter(10)
    for _ in range(4):
        clock.now += 3.0
        backlog.leave(10)
    assert backlog.wait_s() == pytest.approx(4 * 3.0)


def test_idle_time_is_not_taken_for_a_slow_pace():
    backlog, clock = make()
    for _ in range(2):
        backlog.enter(10)
    backlog.leave(10)
    clock.now += 0.5
    backlog.leave(10)
    clock.now += 3600.0
    backlog.enter(10)
    backlog.enter(10)
    backlog.leave(10)
    assert backlog.wait_s() == pytest.approx(0.5)


def test_retry_after_is_between_a_second_and_ten_minutes():
    for rate, want in ((1e9, 1.0), (1e-3, LONGEST_RETRY_S), (0.0, 1.0)):
        backlog, _ = make(max_requests=1, rate=rate)
        backlog.enter(100)
        with pytest.raises(TooManyRequests) as error:
            backlog.check(1, 1)
        assert error.value.retry_after_s == want


def test_crowd_is_answered_or_refused_with_a_time_to_come_back():
    gate = asyncio.Event()

    def gated(engine, number, prompt, params):
        yield gate
        yield Output(number, [5], None)
        yield Output(number, [5], "length")

    api = Api(gated, http=HttpLimits(max_queued_requests=20))
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
            assert api.serving.backlog.requests == 20
            gate.set()
            return await asyncio.gather(*asked)

    answers = asyncio.run(crowd())
    codes = [a.status_code for a in answers]
    assert (codes.count(200), codes.count(429)) == (20, 180)
    refused = next(a for a in answers if a.status_code == 429)
    assert error_of(refused)["type"] == "TooManyRequests"
    assert int(refused.headers["retry-after"]) == 30  # 20 prompts of 3 tokens at 2 a second
    backlog = api.serving.backlog
    assert (backlog.requests, backlog.tokens, api.serving.active_sequences) == (0, 0, 0)


@pytest.mark.parametrize("cached", [[0, 4], [4, 4]])
def test_usage_has_what_every_sequence_of_the_prompt_found(cached):
    def speak(engine, number, prompt, params):
        yield Output(number, [5], "length", cached_tokens=cached[number])

    body = Api(speak).complete([5, 6, 7, 8, 9], n=2, max_tokens=1).json()
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": min(cached)}
