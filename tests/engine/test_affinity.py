"""`taskset -c 1 cpuserve serve`: all processes and threads stay on the allowed CPU."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.helpers.served import running_server
from tests.helpers.tiny import tiny_model

pytestmark = pytest.mark.skipif(
    shutil.which("taskset") is None, reason="taskset is not installed (util-linux of Linux has it)"
)


def process_and_children(pid):
    """Return {pid: status of each thread} for the server and its engine."""
    folders = [Path(f"/proc/{pid}")]
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"\nPPid:\t{pid}\n" in (folder / "status").read_text():
                folders.append(folder)
        except OSError:  # it has ended
            continue
    return {
        folder.name: [(task / "status").read_text() for task in (folder / "task").glob("*")]
        for folder in folders
    }


@pytest.mark.deep
def test_one_allowed_cpu_gets_one_compute_thread_and_everything_else():
    cpu = max(os.sched_getaffinity(0))
    bind, prefix = ("--omp-threads-bind", "auto"), ["taskset", "-c", str(cpu)]
    with running_server(tiny_model("llama"), *bind, prefix=prefix) as client:
        answer = client.post("/v1/completions", prompt=[5, 6, 7], max_tokens=4, ignore_eos=True)
        report = json.loads(client.get("/v1/cpu"))
        threads = process_and_children(client.pid)
    assert answer["usage"]["completion_tokens"] == 4
    assert (report["placement"]["threads"], report["placement"]["bind"]) == (1, str(cpu))
    assert report["live"]["threads_on"] == [cpu]
    # The front end, the engine, and the process that renders templates, perhaps with a warm copy.
    assert len(threads) in (3, 4)
    for status in (status for statuses in threads.values() for status in statuses):
        assert re.search(rf"^Cpus_allowed_list:\t{cpu}$", status, re.MULTILINE)
