"""Waiting for events that must happen, however busy the machine is.

PATIENCE_S is not a requirement: a test waits so long only if the event never happens.
"""

import asyncio
import functools
import time

import psutil

PATIENCE_S = 120.0
POLL_S = 0.02  # how often it is looked whether an event has happened


def wait_until(condition, what="it did not happen", poll_s=POLL_S):
    """Return when condition() holds; fail with `what`, or what it returns, if it never does."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, what() if callable(what) else what
        time.sleep(poll_s)


async def until(condition, poll_s=0.005):
    """Like wait_until, but without blocking the event loop."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(poll_s)


def in_loop(test):
    """Run an async test in an event loop of its own."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(test(*args, **kwargs))

    return run


def wait_gone(pid):
    """Return when the process `pid` has ended, even if its parent has not waited for it."""
    wait_until(lambda: not _runs(pid), f"process {pid} did not end")


def _runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
