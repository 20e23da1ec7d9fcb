"""Python threads in addition to the thread team, for work where numpy releases the GIL."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from cpuserve.base.affinity import move_to


def threads_on(count: int, cpus: Sequence[int] | None) -> ThreadPoolExecutor:
    """Return a pool of `count` threads that may run on all of `cpus`."""
    return ThreadPoolExecutor(count, "cpuserve-convert", initializer=move_to, initargs=(cpus,))
