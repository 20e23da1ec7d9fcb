"""How many heaps a process has, and where its long blocks are, as malloc itself counts them."""

from __future__ import annotations

import json
import platform
import subprocess
import sys

import pytest

from cpuserve.platforms.heap import LONG_BYTES, MOST_HEAPS, bound_heaps, give_back
from tests.helpers.children import child_options

GLIBC = platform.libc_ver()[0] == "glibc"

# Prints the number of heaps after many threads have allocated at once, and how many of two long
# blocks are outside of heaps, after a longer one was freed. malloc is called directly, because a
# library may have an allocator of its own.
COUNTS = """
import ctypes, json, os, sys, tempfile, threading
from cpuserve.platforms.heap import LONG_BYTES, bound_heaps

bounded = sys.argv[1] == "bounded" and bound_heaps()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = libc.fclose.argtypes = [ctypes.c_void_p]
libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
class Info(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]
libc.mallinfo2.restype = Info

together = threading.Barrier(12)
def work():
    together.wait()
    blocks = [libc.malloc(5000) for _ in range(100)]
    together.wait()  # no heap is free for another thread
    for block in blocks:
        libc.free(block)
threads = [threading.Thread(target=work) for _ in range(12)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
with tempfile.NamedTemporaryFile() as file:
    stream = libc.fopen(file.name.encode(), b"w")
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    heaps = file.read().count(b"<heap nr=")

libc.free(libc.malloc(64 * LONG_BYTES))
before = libc.mallinfo2().hblks
blocks = [libc.malloc(8 * LONG_BYTES) for _ in range(2)]
outside = libc.mallinfo2().hblks - before
print(json.dumps([bounded, heaps, outside]))
"""


def counts(how):
    command = [sys.executable, "-c", COUNTS, how]
    done = subprocess.run(command, **child_options(), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.skipif(not GLIBC, reason="only the GNU C library has these heaps")
def test_a_process_has_few_heaps_and_none_of_its_long_blocks_in_them():
    bounded, heaps, outside = counts("bounded")
    assert bounded
    assert heaps <= MOST_HEAPS
    assert outside == 2


@pytest.mark.skipif(not GLIBC, reason="only the GNU C library has these heaps")
def test_by_itself_malloc_has_a_heap_for_each_thread_and_long_blocks_in_them():
    _, heaps, outside = counts("as it is")
    assert heaps > MOST_HEAPS
    assert outside == 0


def test_without_the_gnu_c_library_nothing_is_set(monkeypatch):
    monkeypatch.setattr("cpuserve.platforms.heap.ctypes.CDLL", lambda name: object())
    assert not bound_heaps()
    give_back()
    assert LONG_BYTES == 128 << 10
