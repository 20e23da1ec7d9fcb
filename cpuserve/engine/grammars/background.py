"""Threads of low priority, for work that must not delay streams. No slow modules are imported."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence

from cpuserve.base.affinity import move_to

STACK_BYTES = 16 << 20
# On a core that the engine keeps busy, a thread with this nice value gets a seventieth of the time
# (Linux weights are 15 for nice 19 and 1,024 for nice 0). It gets more while the engine's threads
# yield before the next step. With 4 streams of SmolLM2 on 2 cores,
# the median gap between tokens is 1.2 times as long while a process compiles.
NICE = 19


def deep_thread(work: Callable[[], None], stack_bytes: int) -> threading.Thread:
    """Start and return a thread with a stack of `stack_bytes`."""
    before = threading.stack_size(stack_bytes)
    thread = threading.Thread(target=work)
    thread.start()
    threading.stack_size(before)
    return thread


def yield_to_streams(cpus: Sequence[int] | None) -> None:
    """Lower the priority of this thread only, where the system can do that, and move it to `cpus`.

    cpus: None = the thread keeps its CPUs.
    """
    # On other systems, nice() changes the priority of the whole process.
    if sys.platform == "linux":
        os.nice(NICE)
    move_to(cpus)
