"""Real processes under memory limits: the size that an error message names works."""

import re
import subprocess
import sys

import pytest

from tests.helpers.children import child_options
from tests.helpers.depth import deep_but
from tests.helpers.patience import PATIENCE_S
from tests.helpers.served import running_server
from tests.helpers.tiny import tiny_model

LIMITED = (
    "import os, resource as r, sys; name, limit = sys.argv[1], int(sys.argv[2]); "
    "r.setrlimit(getattr(r, name), (limit, limit)); os.execv(sys.argv[3], sys.argv[3:])"
)
MIB = 1 << 20


def limited(name, mib):
    return [sys.executable, "-c", LIMITED, name, str(mib * MIB)]


def refused(model, prefix, *options):
    command = [*prefix, sys.executable, "-m", "cpuserve", "serve", str(model), *options]
    ended = subprocess.run(
        command, **child_options(), capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.count("\n") == 1, ended.stderr
    return ended.stderr


LIMITS = [("RLIMIT_AS", 1000, "ulimit -v"), ("RLIMIT_DATA", 700, "ulimit -d")]


@pytest.mark.deep
@pytest.mark.parametrize("limit", deep_but(LIMITS[:1], LIMITS))
def test_the_largest_cache_named_under_a_limit_serves_under_it(limit):
    name, mib, what = limit
    model = tiny_model("llama", dtype="bfloat16")
    threads = ("--omp-threads-bind", "0")
    error = refused(model, limited(name, mib), "--kv-cache-memory", "4", *threads)
    assert f"{what} is free beside the weights" in error
    largest = re.search(r"give at most ([\d.]+)", error)[1]
    assert float(largest) > 0.2
    options = ("--kv-cache-memory", largest, *threads)
    with running_server(model, *options, prefix=limited(name, mib)) as client:
        body = {"prompt": "word " * 60, "max_tokens": 8}
        answer = client.post("/v1/completions", model=str(model), **body)
        assert answer["usage"]["completion_tokens"] > 0


def test_less_than_the_processes_need_is_refused_with_what_would_do():
    error = refused(tiny_model("llama", dtype="bfloat16"), limited("RLIMIT_DATA", 200))
    assert "not enough memory" in error
    assert re.search(
        r"with a margin [\d.]+ MiB in all; only 200\.00 MiB under ulimit -d is free", error
    )
