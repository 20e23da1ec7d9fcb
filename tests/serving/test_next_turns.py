"""Next turns are computed only while no request runs, and dropped when one arrives."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress

import pytest

from cpuserve.base.errors import InvalidRequest
from cpuserve.serving.calls.call import GenerateCall
from cpuserve.serving.generation.next_turn import compute_next_turns
from cpuserve.serving.models import next_turns
from cpuserve.serving.models.next_turns import NextTurns, TurnAhead


def call(*texts, caller="a"):
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return GenerateCall(messages=messages, caller=caller)


class Work:
    """The work for a turn: it begins, and ends when a test says so."""

    def __init__(self):
        self.begun, self.may_end = asyncio.Event(), asyncio.Event()
        self.ended, self.cancelled = asyncio.Event(), 0

    async def __call__(self):
        self.begun.set()
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            self.begun.clear()
            raise
        self.ended.set()


def ready(turns, work, *texts):
    number = turns.keep(TurnAhead(call(*(texts or ("q",))), 10))
    turns.answered(number, work)
    return number


@asynccontextmanager
async def computing(turns):
    task = asyncio.create_task(compute_next_turns(turns))
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def test_work_waits_for_requests_ends_when_one_arrives_and_begins_again():
    async def run():
        turns, work = NextTurns(pause_s=0), Work()
        turns.count(1)
        async with computing(turns):
            number = ready(turns, work)
            for _ in range(20):
                await asyncio.sleep(0)
            assert not work.begun.is_set()
            turns.count(-1)
            await asyncio.wait_for(work.begun.wait(), 60)
            turns.count(2)
            while not work.cancelled:
                await asyncio.sleep(0)
            assert turns.get(number) is not None
            turns.count(-1)
            for _ in range(20):
                await asyncio.sleep(0)
            assert not work.begun.is_set()
            turns.count(-1)
            await asyncio.wait_for(work.begun.wait(), 60)
            work.may_end.set()
            await asyncio.wait_for(work.ended.wait(), 60)
            while len(turns):
                await asyncio.sleep(0)
        assert work.cancelled == 1

    asyncio.run(run())


def test_a_gap_between_requests_that_follow_one_another_begins_no_work():
    async def run():
        turns, work = NextTurns(pause_s=3600), Work()
        async with computing(turns):
            ready(turns, work)
            for _ in range(50):
                turns.count(1)
                await asyncio.sleep(0)
                turns.count(-1)
                await asyncio.sleep(0)
            assert not work.begun.is_set()

    asyncio.run(run())


def test_the_conversation_that_has_ended_last_comes_first():
    async def run():
        turns, first, second = NextTurns(pause_s=0), Work(), Work()
        turns.count(1)
        one, other = (turns.keep(TurnAhead(call(text), 10)) for text in "ab")
        turns.answered(other, second)
        turns.answered(one, first)
        async with computing(turns):
            turns.count(-1)
            await asyncio.wait_for(first.begun.wait(), 60)
            assert not second.begun.is_set()
            first.may_end.set()
            await asyncio.wait_for(second.begun.wait(), 60)

    asyncio.run(run())


def test_a_refused_conversation_is_forgotten_and_another_error_is_reported():
    async def refused():
        raise InvalidRequest("the template refuses it")

    async def broken():
        raise RuntimeError("a defect")

    async def run():
        turns, work = NextTurns(pause_s=0), Work()
        work.may_end.set()
        ready(turns, refused, "x")
        async with computing(turns):
            while len(turns):
                await asyncio.sleep(0)
            ready(turns, work, "y")
            await asyncio.wait_for(work.ended.wait(), 60)
        ready(turns, broken, "z")
        with pytest.raises(RuntimeError, match="a defect"):
            await asyncio.wait_for(compute_next_turns(turns), 60)
        assert not len(turns)

    asyncio.run(run())


def test_a_later_request_of_a_conversation_replaces_the_earlier_one():
    turns = NextTurns()
    turns.keep(TurnAhead(call("one", "two", "three"), 10))
    assert turns.keep(TurnAhead(call("one", "two", "three", "four", "five"), 10)) is not None
    assert len(turns) == 1
    turns.keep(TurnAhead(call("one", "2", "3", "4", "5", "6", "7"), 10))
    turns.keep(TurnAhead(call("one", "two", "three", "four", "five", "six", caller="b"), 10))
    assert len(turns) == 3


def test_conversations_are_bounded_in_number_and_bytes(monkeypatch):
    turns = NextTurns()
    assert turns.keep(TurnAhead(call("x"), next_turns.MAX_BODY + 1)) is None
    numbers = [turns.keep(TurnAhead(call(f"{i}"), 1)) for i in range(next_turns.MAX_TURNS + 5)]
    assert len(turns) == next_turns.MAX_TURNS
    assert turns.get(numbers[4]) is None
    assert turns.get(numbers[5]) is not None
    for i in range(10):
        turns.keep(TurnAhead(call(f"large {i}"), next_turns.MAX_BODY))
    assert len(turns) == next_turns.MAX_BYTES // next_turns.MAX_BODY
    turns.forget(12345)
