"""The heap of a process, where malloc of the GNU C library keeps the memory that is freed.

By default there are eight heaps for each CPU, and threads share them. Each keeps what its longest
job has needed, so that the memory of a server grows for hours while jobs change their threads.
Blocks of more than 128 KiB are outside of heaps, but only until the first of them is freed:
then malloc raises this size, up to 32 MiB, and such blocks leave holes in the heaps.
"""

from __future__ import annotations

import ctypes

# Parameters of mallopt, from <malloc.h>.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
# The event loop and its threads allocate while they hold the interpreter's lock, so one heap for
# the main thread and one for all others are enough. Threads of tokenizers have caches of their own.
MOST_HEAPS = 2
# A longer block has pages of its own, which return to the system when it is freed. So does the end
# of the main heap if it is longer. Both are the values that malloc begins with.
LONG_BYTES = 128 << 10


def bound_heaps() -> bool:
    """Let malloc use few heaps, and none for long blocks; return whether it can.

    It must be called before other threads allocate: heaps that exist remain.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False  # only the GNU C library has mallopt; on Windows, CDLL needs a name
    set_to = ((M_ARENA_MAX, MOST_HEAPS), (M_MMAP_THRESHOLD, LONG_BYTES))
    return all(mallopt(*each) == 1 for each in (*set_to, (M_TRIM_THRESHOLD, LONG_BYTES)))


def give_back() -> None:
    """Return the freed memory in all heaps to the system, in 10 to 160 ms after large requests."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return  # only the GNU C library has malloc_trim
    trim(0)
