"""How much memory the process for grammars has taken for them, and its limits."""

from __future__ import annotations

import ctypes
import os
import resource
import time
from contextlib import suppress
from pathlib import Path

READ_S = 0.25  # reading takes some microseconds, as much as a bitmask


class Memory:
    """Bytes taken by this process since this was made; 0 where the system does not say."""

    def __init__(self) -> None:
        self._before = _resident_bytes()
        self._grown = 0
        self._read_at = 0.0
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def grown(self) -> int:
        """Return the bytes taken since the beginning."""
        self._read_at = time.monotonic()
        self._grown = max(_resident_bytes() - self._before, 0)
        return self._grown

    def grown_lately(self) -> int:
        """Return the same as up to READ_S ago."""
        return self.grown() if time.monotonic() - self._read_at > READ_S else self._grown

    def give_back(self) -> None:
        """Return freed memory to the system; glibc keeps it otherwise."""
        if self._trim is not None:
            self._trim(0)


def limit_growth(num_bytes: int) -> None:
    """Limit the address space to its size now and `num_bytes` more, where that works."""
    with suppress(OSError, ValueError):
        limit = _pages(0) * resource.getpagesize() + num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _resident_bytes() -> int:
    with suppress(OSError, ValueError):
        return _pages(1) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _pages(field: int) -> int:
    """Return a field of statm: 0 = the address space, 1 = resident pages."""
    return int(Path("/proc/self/statm").read_bytes().split()[field])
