"""Find the library that provides malloc to this process, and say whether that matters for speed."""

from __future__ import annotations

import platform
import re

# Libraries that replace the malloc of the C library if they are preloaded.
REPLACEMENTS = r"lib(?:tcmalloc|jemalloc|mimalloc)[\w.-]*"
# Counted with a preloaded library for one stream of SmolLM2: 14 calls of malloc a token
# in the engine, all for less than 128 KB and none in C++ code, and 2 in the front end.
# At 50 ns each (estimated) they take 1 us of the 7 ms of a token, the most
# that a faster allocator could save. Also, the front end returns freed memory with a function
# that only glibc has (api/request/memory_trim.py).
ALLOCATOR_MEANS = "malloc is called 16 times a token, so tcmalloc or jemalloc would not help"


def allocator(maps: str) -> str:
    """Return the name of the library that provides malloc.

    maps: the content of /proc/self/maps, which lists the files that are mapped into the process.
    """
    found = re.search(rf"/({REPLACEMENTS})$", maps, re.MULTILINE)
    if found:
        return found[1]
    name, version = platform.libc_ver()
    return f"{name} {version}".strip() or "the C library"
