"""Work that must not delay streams: threads of low priority. It imports nothing that takes time."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

STACK_BYTES = 16 << 20
# On a core that the engine keeps busy, Linux gives a thread of this priority a seventieth of the
# time (weights of 15 and 1,024), and more where the engine's threads wait for the next step and
# yield. Median gaps between tokens of 4 streams of SmolLM2 on 2 cores, over normal: while the
# process for grammars starts, 1.5 at priority 10 and 1.1 at 19; while it compiles at 19, 1.2. The
# price is that the first client with a grammar waits for 3 s instead of 1 s; beside streams of a
# 0.5B model it waits as long as at 10.
NICE = 19


def deep_thread(work: Callable[[], None], stack_bytes: int) -> threading.Thread:
    """Start a thread with a stack of this size."""
    before = threading.stack_size(stack_bytes)
    thread = threading.Thread(target=work)
    thread.start()
    threading.stack_size(before)
    return thread


def yield_to_streams(cpus: Sequence[int] | None) -> None:
    """Lower the priority of this thread alone, where the system can do that, and move it to `cpus`.

    cpus: None = it stays where it is.
    """
    if sys.platform == "linux":  # elsewhere this is the priority of the process
        os.nice(NICE)
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
