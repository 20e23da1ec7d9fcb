"""Return the freed memory of large requests to the operating system.

The C library keeps freed memory between blocks that are still in use: 100 to 3,000 MB
after a text of a million tokens. All but 1 MB of this memory can be returned in 10 to 160 ms.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import re
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from cpuserve.platforms.heap import give_back

# Seconds until the error response of a rejected request has been sent and its memory freed.
_DELAY_S = 1.0

# Matches one mapping in /proc/PID/smaps: its addresses, permissions, and its statistics.
_MAPPING = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ [1-9]\d* +/.*\n((?:[A-Z].*\n)+)", re.MULTILINE
)
_UNCHANGED = re.compile(r"^Anonymous: +0 kB$", re.MULTILINE)

_due: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()


def trim_soon() -> None:
    """Return freed memory to the system after a second; further calls in that second do nothing."""
    loop = asyncio.get_running_loop()
    if loop not in _due:
        _due.add(loop)
        loop.call_later(_DELAY_S, _give_back, loop)


def trim_asleep() -> None:
    """Return to the system all memory that a server without loaded models does not need.

    This is freed memory and the pages of shared libraries, 20 of 80 MB;
    the system reads such pages again from their files when they are used.
    """
    give_back()
    with suppress(OSError, AttributeError):  # only Linux has /proc, and only Unix madvise
        _drop_file_pages(Path("/proc/self/smaps").read_text(), ctypes.CDLL(None).madvise)


def _drop_file_pages(
    smaps: str, madvise: Callable[[ctypes.c_void_p, ctypes.c_size_t, int], int]
) -> None:
    """Drop the memory pages of mapped files that are read-only and unchanged.

    smaps: the text of /proc/self/smaps.
    """
    for begin, end, permissions, rest in _MAPPING.findall(smaps):
        if "w" not in permissions and _UNCHANGED.search(rest):
            start = int(begin, 16)
            size = ctypes.c_size_t(int(end, 16) - start)
            madvise(ctypes.c_void_p(start), size, mmap.MADV_DONTNEED)


def _give_back(loop: asyncio.AbstractEventLoop) -> None:
    _due.discard(loop)
    loop.run_in_executor(None, give_back)
