"""Long texts are tokenized on threads that the streams go before, and with the same result."""

import json
import subprocess
import sys

import pytest

from cpuserve.tokenizer.unlocked import LONG_CHARS, NICE
from tests.helpers.children import child_options
from tests.helpers.tiny import tiny_model

# A process of its own, because the threads of the library start only once.
TRIES = """
import json, os, sys, threading, time
from pathlib import Path
from cpuserve.tokenizer.tokenizer import Tokenizer
from cpuserve.tokenizer.unlocked import yield_to_streams

def threads():
    return {int(name) for name in os.listdir("/proc/self/task")}

def share(text):
    all_threads, this_thread = time.process_time(), time.thread_time()
    ids = tokenizer.encode(text, unlocked=True), tokenizer.encode_masked(text)
    this_thread = time.thread_time() - this_thread
    return this_thread / (time.process_time() - all_threads), ids

tokenizer = Tokenizer.load(Path(sys.argv[1]))
long, short = "The river is long. " * 20_000, "x" * int(sys.argv[2])
before = threads()
yield_to_streams(5)
# The thread that started them goes some time after it was joined, and the system's list of threads
# ends early where one goes while it is read: so the list is read until it is 5 twice in a row.
started, until = set(), time.monotonic() + 20
while time.monotonic() < until:
    last, started = started, threads() - before
    if started == last and len(started) == 5:
        break
    time.sleep(0.01)
niceness = [os.getpriority(os.PRIO_PROCESS, thread) for thread in started]
shares, ids = zip(*[share(text) for text in (long, short)])
found = {
    "niceness": niceness,
    "own": os.getpriority(os.PRIO_PROCESS, 0),
    "shares": shares,
    "equal": [*ids] == [(tokenizer._coder._core.encode(text).ids,) * 2 for text in (long, short)],
    "spans": [span.id for span in tokenizer.encode_spans(long)] == ids[0][0],
}
print(json.dumps(found))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
@pytest.mark.parametrize("given", ["true", "false"])
def test_long_texts_run_on_threads_of_low_priority_and_short_ones_where_they_are(given):
    command = [sys.executable, "-c", TRIES, str(tiny_model("llama")), str(LONG_CHARS // 2)]
    child = subprocess.run(
        command, check=True, capture_output=True, **child_options(TOKENIZERS_PARALLELISM=given)
    )
    found = json.loads(child.stdout)
    assert found["equal"]
    assert found["spans"]
    assert len(found["niceness"]) == 5
    assert set(found["niceness"]) == {min(found["own"] + NICE, 19)}
    long, short = found["shares"]
    assert long < 0.5
    assert short > 0.9


# On one CPU the library would have one thread, and a short text would wait for the long one.
PASSES = """
import os, sys, threading, time
from pathlib import Path
from cpuserve.tokenizer.tokenizer import Tokenizer
from cpuserve.tokenizer.unlocked import LONG_CHARS, encoded, yield_to_streams

tokenizer, order = Tokenizer.load(Path(sys.argv[1])), []
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
yield_to_streams(2)

def encode(name, text):
    encoded(tokenizer._coder._core, text, add_special_tokens=False)
    order.append(name)

long = threading.Thread(target=encode, args=("long", "The river is long. " * 200_000))
used = time.process_time()
long.start()
while time.process_time() - used < 0.1:
    time.sleep(0.001)
encode("short", "x " * LONG_CHARS)
long.join()
print(*order, os.environ.get("RAYON_NUM_THREADS"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
def test_a_text_does_not_wait_until_all_of_a_longer_one_is_tokenized():
    command = [sys.executable, "-c", PASSES, str(tiny_model("llama"))]
    child = subprocess.run(
        command, check=True, capture_output=True, **child_options(TOKENIZERS_PARALLELISM="true")
    )
    assert child.stdout.split() == [b"short", b"long", b"None"]
