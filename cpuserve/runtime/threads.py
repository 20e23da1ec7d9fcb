"""Python threads in addition to the thread team, for work where numpy releases the GIL."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress


def run_on(cpus: Sequence[int] | None) -> None:
    """Let the calling thread run on all of `cpus`; None: do not change its CPUs.

    A new thread inherits the CPUs of its creator, which may be pinned to one CPU.
    """
    if cpus and hasattr(os, "sched_setaffinity"):
        with suppress(OSError):
            os.sched_setaffinity(0, cpus)


def threads_on(count: int, cpus: Sequence[int] | None) -> ThreadPoolExecutor:
    """Return a pool of `count` threads that may run on all of `cpus`."""
    return ThreadPoolExecutor(count, "cpuserve-convert", initializer=run_on, initargs=(cpus,))
