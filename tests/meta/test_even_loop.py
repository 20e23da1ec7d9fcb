"""The clock of tests/helpers/even_loop.py: it stands still while the process does."""

import asyncio
import socket
import time

import pytest

from tests.helpers.even_loop import run_even

LIMIT_S = 0.1


async def passed_before_the_timer():
    """Return how many bytes come, each in a turn of its own, before a timer of LIMIT_S."""
    loop, late = asyncio.get_running_loop(), asyncio.Event()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        loop.call_later(LIMIT_S, late.set)
        came = 0
        while came < 9 and not late.is_set():
            theirs.send(b"a")
            time.sleep(LIMIT_S)  # the process does not run
            came += len(await loop.sock_recv(ours, 1))
            await asyncio.sleep(0)
        return came


def test_pauses_of_the_process_are_no_time_of_the_loop():
    assert asyncio.run(passed_before_the_timer()) < 9
    assert run_even(passed_before_the_timer()) == 9


def test_waits_of_the_loop_are_its_time():
    async def main():
        loop, order = asyncio.get_running_loop(), []
        loop.call_later(0.02, order.append, "late")
        loop.call_later(0.01, order.append, "soon")
        await asyncio.sleep(0.03)
        return order

    assert run_even(main()) == ["soon", "late"]


def test_a_timer_ends_a_loop_that_always_has_something_to_do():
    async def main():
        late = asyncio.Event()
        asyncio.get_running_loop().call_later(LIMIT_S, late.set)
        while not late.is_set():
            await asyncio.sleep(0)

    run_even(main())


def test_what_is_left_is_cancelled_and_an_error_is_raised():
    ended = []

    async def endless():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def main():
        task = asyncio.create_task(endless())
        await asyncio.sleep(0)
        assert not task.done()
        raise ValueError(await asyncio.to_thread(lambda: "why"))

    with pytest.raises(ValueError, match=r"^why$"):
        run_even(main())
    assert ended == [True]
