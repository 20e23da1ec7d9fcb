"""Measures and limits the memory of the grammar process."""

from __future__ import annotations

import ctypes
import os
import resource
import time
from contextlib import suppress
from pathlib import Path

READ_S = 0.25  # seconds between two readings, which cost as much as a bitmask (microseconds)


class Memory:
    """The growth of this process since the object was created, in bytes; 0 if it is unknown."""

    def __init__(self) -> None:
        self._before = _resident_bytes()
        self._grown = 0
        self._read_at = 0.0
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def grown(self) -> int:
        """Read the growth of the process and return it, in bytes."""
        self._read_at = time.monotonic()
        self._grown = max(_resident_bytes() - self._before, 0)
        return self._grown

    def grown_lately(self) -> int:
        """Return the growth in bytes from a reading that is at most READ_S seconds old."""
        return self.grown() if time.monotonic() - self._read_at > READ_S else self._grown

    def give_back(self) -> None:
        """Return freed memory to the system, because glibc would keep it."""
        if self._trim is not None:
            self._trim(0)


def limit_growth(num_bytes: int) -> None:
    """Limit the address space to its current size plus `num_bytes`, if the system supports this."""
    with suppress(OSError, ValueError):
        limit = _pages(0) * resource.getpagesize() + num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _resident_bytes() -> int:
    with suppress(OSError, ValueError):
        return _pages(1) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _pages(field: int) -> int:
    """Return a field of /proc/self/statm, in pages. Field 0 is address space, 1 resident memory."""
    return int(Path("/proc/self/statm").read_bytes().split()[field])
