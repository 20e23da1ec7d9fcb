"""Find the library that provides malloc to this process, and say whether that matters."""

from __future__ import annotations

import platform
import re

# Libraries that replace the C library's malloc if they are preloaded.
REPLACEMENTS = r"lib(?:tcmalloc|jemalloc|mimalloc)[\w.-]*"
# Counted with a preloaded library for one stream of SmolLM2: 14 calls a token in the engine, all
# for less than 128 KB and none in C++ code, and 2 in the front end. At 50 ns each (estimated) this
# is 1 us of a token's 7 ms, the most that a faster allocator could save. And the front end returns
# freed memory to the system by a function that only glibc has (api/request/memory_trim.py).
ALLOCATOR_MEANS = "malloc is called 16 times a token, so tcmalloc or jemalloc would not help"


def allocator(maps: str) -> str:
    """Return the name of the library that provides malloc.

    maps: /proc/self/maps of the process, which lists the files that are mapped into it.
    """
    found = re.search(rf"/({REPLACEMENTS})$", maps, re.MULTILINE)
    if found:
        return found[1]
    name, version = platform.libc_ver()
    return f"{name} {version}".strip() or "the C library"
