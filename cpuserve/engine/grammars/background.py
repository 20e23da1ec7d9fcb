"""Work that must not delay streams: threads of low priority. It imports nothing that takes time."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

STACK_BYTES = 16 << 20
# On a core that the engine keeps busy, Linux gives a thread of priority 14 about a twentieth of the
# time (weights of 45 and 1,024), and one of 19 a seventieth. They get more than that, because
# threads that wait for the next step yield. While the process started at 10, every second gap
# between tokens was 1.5 times as long as normal, at 14 1.2 times (SmolLM2, 4 streams, 2 cores), and
# the first client waited 2.4 s instead of 0.9 s for its grammar; at 19 it waits for 3 s. While
# grammars compile at 19, gaps are 1.25 times as long, and beside requests without a schema 1.4
# times.
NICE = 14
COMPILE_NICE = 19


def deep_thread(work: Callable[[], None], stack_bytes: int) -> threading.Thread:
    """Start a thread with a stack of this size."""
    before = threading.stack_size(stack_bytes)
    thread = threading.Thread(target=work)
    thread.start()
    threading.stack_size(before)
    return thread


def yield_to_streams(cpus: Sequence[int] | None, nice: int = NICE) -> None:
    """Lower the priority of this thread alone, where the system can do that, and move it to `cpus`.

    cpus: None = it stays where it is.
    """
    if sys.platform == "linux":  # elsewhere this is the priority of the process
        os.nice(nice)
    move_to(cpus)


def move_to(cpus: Sequence[int] | None) -> None:
    """Let this thread run on these CPUs alone, where the system can do that; None = on any."""
    if cpus and hasattr(os, "sched_setaffinity"):
        with suppress(OSError):  # the process may no longer use them
            os.sched_setaffinity(0, cpus)


def gently(work: Callable[[], None], cpus: Sequence[int] | None) -> None:
    """Call `work` on a thread that yields to streams, and wait for it; raises what it raises."""
    raised: list[BaseException] = []

    def run() -> None:
        yield_to_streams(cpus)
        try:
            work()
        except BaseException as error:  # raised again below
            raised.append(error)

    deep_thread(run, STACK_BYTES).join()
    if raised:
        raise raised[0]
