"""Minutes of all that clients do, at once: the processes of a server do not grow.

The driver also runs by hand, for longer and with another model: python -m tests.soak.driver.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import random
import subprocess
import sys
from collections import Counter

import psutil
import pytest

from cpuserve.serving.threads import TOKENIZING
from tests.helpers.children import child_options
from tests.helpers.tiny import tiny_model
from tests.soak.clients import DOINGS
from tests.soak.driver import (
    FINEST,
    LOST,
    MAY_GROW,
    SAMPLES,
    SURE,
    WITHOUT_CACHES,
    Sample,
    Soaked,
    for_count,
    report,
    slopes_of,
    soak,
)
from tests.soak.inside import THREADS, Inside
from tests.soak.processes import FRONT_END, NAMES, ROLES, Held, Slope, memory, slopes

NOTHING = Held(0, 0, 0, 0, 0)


@pytest.mark.deep
def test_after_three_minutes_of_load_a_server_has_what_it_had_before():
    model = str(tiny_model("llama", max_position_embeddings=4096))
    # Heaps still grow after so short a warm-up, so slopes are for the driver's longer runs.
    found = asyncio.run(soak(model, 160, warm_up=1500, judges=False))
    assert not found.faults, report(found)
    assert found.statuses.keys() <= {doing.__name__.strip("_") for doing in DOINGS}
    print(report(found))


def test_a_warm_up_ends_by_the_number_of_things_and_not_by_time():
    choose, rng = for_count(7), random.Random(0)
    found = [choose(rng) for _ in range(9)]
    assert set(found[:7]) <= set(DOINGS)
    assert found[7:] == [None, None]


@pytest.mark.parametrize("name", NAMES)
def test_what_grows_is_found_and_told(name):
    more = dict.fromkeys(NAMES, 0) | {name: getattr(MAY_GROW, name) + 1}
    found = Soaked(NOTHING, Held(**more), [], {}, "", 1.0)
    assert [fault.partition(" ")[0] for fault in found.faults] == [name]
    assert not Soaked(NOTHING, MAY_GROW, [], {}, "", 1.0).faults


def test_responses_and_logs_with_faults_are_found():
    log = "2026-11-27 12:00:00 INFO fine ERROR\n2026-11-27 12:00:01 ERROR no\n"
    found = Soaked(
        NOTHING, NOTHING, [], {"agent": Counter({200: 5, 503: 1, 504: 1, 500: 2})}, log, 1.0
    )
    assert "12:00:01 ERROR no" in found.faults[0]
    assert found.faults[1:] == ["2 responses 500 to agent"]
    few, many = ({"agent": Counter({200: 1000, LOST: lost})} for lost in (9, 20))
    assert not Soaked(NOTHING, NOTHING, [], few, "", 1.0).faults
    assert Soaked(NOTHING, NOTHING, [], many, "", 1.0).faults == [
        "20 of 1020 requests got no response"
    ]


def test_a_slope_is_that_of_the_line_and_its_error_that_of_the_rest():
    samples = [(3600.0 * hour, Held(100 + 10 * hour, 5, 3 + hour % 2, 2, 0)) for hour in range(11)]
    rss, fds, threads, *_ = slopes(samples)
    assert (rss.an_hour, rss.error) == pytest.approx((10, 0), abs=1e-9)
    assert (rss.first, rss.last) == (100, 200)
    assert (fds.an_hour, fds.error) == (0, 0)
    assert threads.an_hour == pytest.approx(0, abs=1e-9)
    assert 0.01 < threads.error < 0.1


def judged(*slopes):
    return Soaked(NOTHING, NOTHING, [*slopes], {}, "", 1.0, judges=True).faults


@pytest.mark.parametrize("name", FINEST)
def test_a_slope_above_its_noise_is_a_fault_and_so_is_noise_that_hides_slopes(name):
    most = FINEST[name]
    assert not judged(Slope(name, 0.9 * SURE * most, most, 0, 0), Slope(name, -most, 0, 0, 0))
    (grows,) = judged(Slope(name, 1.1 * SURE * most, most, 0, 0))
    assert grows.startswith(f"{name} grows by ")
    (hidden,) = judged(Slope(name, 0.0, 1.1 * most, 0, 0))
    assert hidden.startswith(f"nobody can tell whether {name} grows by ")
    grown = [Slope(name, 9 * most, most, 0, 0)]
    assert not Soaked(NOTHING, NOTHING, grown, {}, "", 1.0).faults


def samples(*, bytes_per_hour):
    """Samples of half an hour, in which the front end grows among the noise of its requests."""
    chance = random.Random(3)

    def noisy(mean, most):
        return int(mean + most * (2 * chance.random() - 1))

    for number in range(SAMPLES):
        at = number * 1800 / SAMPLES
        grown = int(at / 3600 * bytes_per_hour)
        memory = Counter({role: noisy(30e6, 2e5) for role in (FRONT_END, *ROLES.values())})
        memory[FRONT_END] += grown
        has = Held(memory.total(), noisy(60, 5), 40, 8, 2)
        yield Sample(at, has, memory, Inside([], noisy(4e5, 1e4), noisy(25e6, 5e5) + grown))


def test_a_leak_of_ten_bytes_a_request_is_found_and_noise_alone_is_none():
    assert judged(*slopes_of([*samples(bytes_per_hour=0)])) == []
    grows = judged(*slopes_of([*samples(bytes_per_hour=10 * 60 * 3600)]))
    assert {each.partition(" grows")[0] for each in grows} == {"rss", FRONT_END, "malloc"}


def test_every_thread_of_the_front_end_is_explained_by_its_name():
    known = [name for name, most in THREADS.items() for _ in range(most)]
    assert Inside(known, 0, 0).strange_threads == []
    assert THREADS["cpuserve-render_"] == 7
    assert Inside([*known, ""], 0, 0).strange_threads == [
        f"{TOKENIZING + 1} threads without a name, at most {TOKENIZING}"
    ]
    assert Inside(["cpuserve-render-large_0"] * 4, 0, 0).strange_threads == [
        "4 threads 'cpuserve-render-large_0', at most 3"
    ]
    assert Inside(["OpenBLAS", "MainThread"], 0, 0).strange_threads == [
        "1 threads 'OpenBLAS', at most 0"
    ]
    strange = Soaked(NOTHING, NOTHING, [], {}, "", 1.0, inside=Inside(["new"], 0, 0))
    assert strange.faults == ["1 threads 'new', at most 0"]


FORK = """
import os, sys
pages = bytearray(b"a" * (16 << 20))
child = os.fork()
if child == 0:
    print(os.getpid(), flush=True)
    sys.stdin.readline()
    for begin in range(0, len(pages), 4096):
        pages[begin] = 98  # the first write to a page makes a copy of it
    print("written", flush=True)
    sys.stdin.readline()
    os._exit(0)
os.waitpid(child, 0)
"""


def test_a_page_of_its_parent_that_a_fork_writes_to_is_no_growth_of_templates():
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with subprocess.Popen([sys.executable, "-c", FORK], **options, **child_options()) as parent:
        fork = psutil.Process(int(parent.stdout.readline()))
        shared, whole = memory(fork), memory(fork, shares=False)
        parent.stdin.write("\n")
        assert parent.stdout.readline() == "written\n"
        assert memory(fork) - shared > 7 << 20
        assert abs(memory(fork, shares=False) - whole) < 1 << 20
        parent.stdin.write("\n")


THREADS_AND_MEMORY = """
import _thread, json, threading
from tests.soak.inside import inside
ends, started, before = threading.Event(), threading.Event(), inside()
threading.Thread(target=ends.wait, name="a name", daemon=True).start()
_thread.start_new_thread(lambda: (started.set(), ends.wait()), ())
started.wait()
held = bytearray(64 << 20)
now = inside()
print(json.dumps([sorted(now.threads), now.malloc - before.malloc, now.blocks]))
"""


def test_a_process_tells_its_threads_and_its_memory():
    command = [sys.executable, "-c", THREADS_AND_MEMORY]
    out = subprocess.run(command, **child_options(), capture_output=True, text=True, check=True)
    threads, malloc, blocks = json.loads(out.stdout)
    assert threads == ["", "MainThread", "a name"]
    held = (64 << 20) * hasattr(ctypes.CDLL(None), "mallinfo2")
    assert abs(malloc - held) < 2 << 20
    assert blocks > 1000


SAMPLES_OF_ITSELF = """
import gc
from tests.soak.inside import inside
inside()
gc.disable()
before = inside()
for _ in range(100):
    now = inside()
print(now.malloc - before.malloc, now.blocks - before.blocks)
"""


def test_what_a_process_tells_is_not_more_because_it_tells_it():
    options = child_options(**WITHOUT_CACHES)
    command = [sys.executable, "-c", SAMPLES_OF_ITSELF]
    out = subprocess.run(command, **options, capture_output=True, check=True).stdout
    malloc, blocks = map(int, out.split())
    assert abs(malloc) < 10_000
    assert abs(blocks) < 300


FREED_BLOCKS = """
import ctypes, threading
from tests.soak.inside import inside
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
freed, ends = threading.Event(), threading.Event()

def work():
    for block in [libc.malloc(24 + 16 * size) for size in range(64) for _ in range(7)]:
        libc.free(block)
    freed.set()
    ends.wait()

before = inside().malloc
threading.Thread(target=work, daemon=True).start()
freed.wait()
print(inside().malloc - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="only glibc tells this")
def test_blocks_that_are_freed_are_not_in_use_without_the_caches_of_threads():
    def freed(**environment):
        command = [sys.executable, "-c", FREED_BLOCKS]
        options = child_options(**environment)
        return int(subprocess.run(command, **options, capture_output=True, check=True).stdout)

    assert abs(freed(**WITHOUT_CACHES)) < 30_000
    # Otherwise they count as in use: 7 of each size, in chunks of 32 to 1,040 bytes.
    assert freed(GLIBC_TUNABLES="") == pytest.approx(7 * 32 * (32 + 1040), abs=30_000)
