"""The CPUs that a thread, and the processes that it starts, may use."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress


def affinity() -> set[int]:
    """Return the CPUs that this thread may use; empty if the system does not report them."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def move_to(cpus: Collection[int] | None) -> None:
    """Let this thread run on all of `cpus`, and only there; None or none: do not change its CPUs.

    A new thread inherits the CPUs of its creator, which may be pinned to one CPU. Nothing changes
    where the system cannot or may not do that: macOS, a sandbox, CPUs that the process has lost.
    """
    if cpus and hasattr(os, "sched_setaffinity"):
        with suppress(OSError):
            os.sched_setaffinity(0, cpus)


@contextmanager
def on_cpus(cpus: set[int]) -> Iterator[None]:
    """Set the affinity of this thread, which children inherit, to `cpus`; restore it at the end.

    An empty set leaves the affinity as it is.
    """
    own = affinity()
    if not cpus or own == cpus or not hasattr(os, "sched_setaffinity"):  # as on macOS
        yield
        return
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)
