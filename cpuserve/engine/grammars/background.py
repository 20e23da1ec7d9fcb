"""Work that must not delay streams: threads of low priority. It imports nothing that takes time."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

STACK_BYTES = 16 << 20
# On a core that the engine keeps busy, a thread of this priority gets a seventieth of the
# time (weights of 15 and 1,024), and more where the engine's threads wait for the next step and
# yield. Median gaps between tokens of 4 streams of SmolLM2 on 2 cores while a process compiles: 1.2
# times as long as normal.
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
