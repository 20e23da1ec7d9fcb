"""An event loop whose clock goes on only while the loop has nothing to do.

A server with a limit of a fraction of a second, and its clients in the same loop, take as many
turns of the loop on a slow machine as on a fast one. By a real clock, a pause of the process would
use the limit up, and whoever is quick in the test would be refused as too slow.
"""

import asyncio
import selectors
import time

TURN_S = 1e-4  # of a turn of the loop, so that timers end a loop that always has something to do
# What the clock may gain at most while events come, so that their callbacks run before a timer.
BEFORE_TIMER = 0.9


class _Waits(selectors.DefaultSelector):
    """Adds up how long the loop had to wait for events."""

    def __init__(self):
        super().__init__()
        self.waited_s = 0.0

    def select(self, timeout=None):
        began = time.monotonic()
        events = super().select(timeout)
        waited_s = time.monotonic() - began
        if timeout is not None:
            waited_s = min(waited_s, timeout * BEFORE_TIMER if events else timeout)
        self.waited_s += TURN_S + waited_s
        return events


class EvenLoop(asyncio.SelectorEventLoop):
    """The event loop of `run_even`."""

    def __init__(self):
        self._waits = _Waits()
        super().__init__(self._waits)
        self._begin = super().time()

    def time(self):
        """Return the time that timers are set by."""
        return self._begin + self._waits.waited_s


def run_even(main):
    """Run a coroutine in an EvenLoop, as asyncio.run does in a usual one; return its result."""
    loop = EvenLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.run_until_complete(_end(loop))
        loop.close()


async def _end(loop):
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()
