"""What only a process knows of itself: what its threads are, and how much of its heap is used.

    python -m tests.soak.inside FILE serve MODEL ...

This is `cpuserve serve MODEL ...`, whose front end adds an Inside to FILE, as a line of JSON,
whenever it gets SIGUSR1. No other thread and no work between requests is needed for it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import msgspec

from cpuserve.serving import threads
from cpuserve.serving.media import reader
from cpuserve.serving.threads import TurnThreads

CPUS = os.cpu_count() or 1
# The threads of the front end: how each is called, at the beginning, and how many there may be.
THREADS: Mapping[str, int] = {
    "MainThread": 1,
    "cpuserve-children": 1,  # starts processes
    "cpuserve-engine-stderr": 1,
    "asyncio_": min(32, CPUS + 4),  # the default executor of asyncio
    "AnyIO worker thread": 40,  # anyio's bound: they read files for responses
    **{
        f"{pool.name}_": pool.count
        for module in (threads, reader)
        for pool in vars(module).values()
        if isinstance(pool, TurnThreads)
    },
    # Threads without a name, which Python has not started: the library of tokenizers.
    "": threads.TOKENIZING,
}


class Inside(msgspec.Struct):
    """threads: what each is called, "" if Python has not started it.

    blocks: memory blocks of Python objects. malloc: bytes of malloc in use, outside of Python's own
    pools; 0 = the C library does not tell it.
    """

    threads: list[str]
    blocks: int
    malloc: int

    @property
    def strange_threads(self) -> list[str]:
        """The threads that nothing explains, and kinds of which there are too many."""
        kinds: dict[str, list[str]] = {}
        for name in self.threads:
            known = (kind for kind in THREADS if kind and name.startswith(kind))
            kinds.setdefault(max(known, key=len, default=name), []).append(name)
        return [
            f"{len(names)} threads {repr(names[0]) if kind else 'without a name'}, at most {most}"
            for kind, names in sorted(kinds.items())
            if len(names) > (most := THREADS.get(kind, 0))
        ]


class _Mallinfo(ctypes.Structure):
    """struct mallinfo2 of <malloc.h>: sizes of all heaps together."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def inside() -> Inside:
    """Return what this process has now."""
    named = [(each.native_id, each.name) for each in threading.enumerate()]
    tasks = {int(task.name) for task in Path("/proc/self/task").iterdir()}
    names = [name for number, name in named if number in tasks]
    unnamed = len(tasks) - len(names)
    return Inside(names + [""] * unnamed, sys.getallocatedblocks(), _malloc_in_use())


def _malloc_in_use() -> int:
    mallinfo = _mallinfo()
    if mallinfo is None:
        return 0
    found = mallinfo()
    return int(found.uordblks + found.hblkhd)


@cache
def _mallinfo() -> Callable[[], _Mallinfo] | None:
    """Return mallinfo2: only once, since each CDLL is a class, and 1.7 kB until the next gc."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except AttributeError:  # not the GNU C library, or one before 2.33
        return None
    mallinfo.restype = _Mallinfo
    return mallinfo


def main() -> int:
    place = Path(sys.argv.pop(1))

    def tell(*_: object) -> None:
        with place.open("ab") as file:
            file.write(msgspec.json.encode(inside()) + b"\n")

    signal.signal(signal.SIGUSR1, tell)
    from cpuserve.__main__ import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
