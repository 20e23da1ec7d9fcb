"""Calls of the system fail while a server starts, or on files of weights: it serves, or says why.

Each table has the points and the ways in which they fail; tests/meta/test_fault_points.py walks
these and those of test_api_fault_points.py.
"""

import errno
import json
import os
import re
import threading
import time
from pathlib import Path

import pytest

from cpuserve.base.fault_points import DELAY, POINTS, SHORT
from tests.api.faulty import FAULTY, KEPT, arm, chat, grammar, restart, seen, sent_file, text
from tests.api.sees import write_served_model
from tests.helpers.patience import PATIENCE_S, wait_until
from tests.helpers.sane import WatchedServer, assert_server_sane, watched_server
from tests.helpers.tiny import tiny_model

pytestmark = pytest.mark.deep
FILES = Path(__file__).parents[1] / "data" / "tls"

# --- experts that are read from the disk ----------------------------------------------------------


EXPERTS = ("expert.read", "expert_heat.read", "expert_heat.write")
EXPERTS += ("expert_use.read", "expert_use.write")


def test_requests_end_with_503_when_their_experts_cannot_be_read(tmp_path):
    plans = tmp_path / "plans"
    plans.mkdir()
    options = [
        *("--max-model-len", 256, "--kv-cache-memory", "256KiB", "--omp-threads-bind", "nobind"),
        *("--weights-on-disk", "600KiB"),
    ]
    faults = {"PYTHONPATH": FAULTY, "CPUSERVE_FAULT": str(plans)}
    fired = arm(plans, ":".join(("expert_heat.read", "1", "EIO")))
    unread = arm(plans, ":".join(("expert_use.read", "1", "EIO")))
    unwritten = arm(plans, ":".join(("expert_use.write", "1", "ENOSPC")))
    with watched_server(tmp_path, tiny_model("qwen3-moe"), *options, **faults) as server:
        wait_until(fired.exists, "the use of experts was not read")
        wait_until(unread.exists, "earlier uses were not looked for")
        wait_until(unwritten.exists, "the use of experts was not recorded")
        assert text(server)[0][0] == 200
        server.settle()
        for action in POINTS["expert.read"].actions:
            fired = arm(plans, ":".join(("expert.read", "1", action)))
            status, body = text(server)[0]
            assert status == (503 if action == "EIO" else 200), body
            assert action != "EIO" or b"cannot be read from the disk" in body
            assert fired.exists()
            assert text(server)[0][0] == 200
            assert_server_sane(server, "an expert cannot be read from the packed weights")
        metrics = server.ask("/metrics")[1]
        assert b"cpuserve:expert_read_errors_total" in metrics
        assert b"cpuserve:expert_misses_total" in metrics
        fired = arm(plans, ":".join(("expert_heat.write", "1", "ENOSPC")))
        server.stop()
        assert fired.exists()
        assert "the use of experts is not kept" in server.log()


def test_a_server_ends_though_a_disk_does_not_give_it_an_expert(tmp_path):
    plans = tmp_path / "plans"
    plans.mkdir()
    options = [
        *("--max-model-len", 256, "--kv-cache-memory", "256KiB", "--omp-threads-bind", "nobind"),
        *("--weights-on-disk", "600KiB", "--drain-timeout", 0),
    ]
    faults = {"PYTHONPATH": FAULTY, "CPUSERVE_FAULT": str(plans), "CPUSERVE_FAULT_DELAY_S": "86400"}
    with watched_server(tmp_path, tiny_model("qwen3-moe"), *options, **faults) as server:
        assert text(server)[0][0] == 200
        fired = arm(plans, ":".join(("expert.read", "1", DELAY)))
        asked = threading.Thread(target=text, args=(server,), daemon=True)
        asked.start()
        wait_until(fired.exists, "no expert was read")
        server.stop()
        asked.join(PATIENCE_S)
        assert not asked.is_alive()


def test_a_killed_engine_with_experts_on_disk_serves_the_same_again(tmp_path):
    options = [
        *("--max-model-len", 256, "--kv-cache-memory", "256KiB", "--omp-threads-bind", "nobind"),
        *("--weights-on-disk", "600KiB"),
    ]
    asked = {"prompt": [11, *range(20, 60)], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with watched_server(tmp_path, tiny_model("qwen3-moe"), *options) as server:

        def answer():
            status, body = server.ask("/v1/completions", asked)
            assert status == 200, body
            return json.loads(body)["choices"]

        expected = answer()
        server.settle()
        for _ in range(2):
            restart(server)
            assert answer() == expected
        assert_server_sane(server, "the engine was killed by", "the engine serves again after")


# --- weights that are kept for the next start -----------------------------------------------------

# With this many weights of 8 bits, the server keeps them in a file (runtime/packed_cache.py).
LARGE = {"hidden_size": 512, "intermediate_size": 16384, "num_hidden_layers": 3}
SETTLED_S = 2.5  # the digest of files that have not changed for this long is recorded
NOT_KEPT = "the quantized weights are not kept for the next start"
SAVING = [
    (point, action)
    for point in ("packed.write", "source.write")
    for action in POINTS[point].actions
]


@pytest.fixture(scope="module")
def saving(tmp_path_factory):
    """Return a function that starts a server which keeps its weights; and one such server."""
    model = tiny_model("llama", dtype="bfloat16", **LARGE)
    newest = max(file.stat().st_ctime for file in model.iterdir())
    wait_until(lambda: time.time() > newest + SETTLED_S, "the clock stands still", poll_s=0.2)
    options = [
        *("--quantization", "int8", "--max-model-len", 512, "--kv-cache-memory", "2MiB"),
        *("--omp-threads-bind", "nobind"),
    ]
    folder = tmp_path_factory.mktemp("saving")
    with watched_server(folder, model, *options) as server:
        wait_until(lambda: "are kept for the next start in" in server.log(), server.log)
        server.settle()
        assert len(kept(folder)) == 1
        yield lambda folder, **faults: watched_server(folder, model, *options, **faults), server
        server.stop()


def kept(folder):
    return list((folder / "cache").rglob("*.weights"))


@pytest.mark.parametrize(("point", "action"), SAVING)
def test_weights_that_cannot_be_kept_are_served(point, action, saving, tmp_path):
    start, healthy = saving
    plans = tmp_path / "plans"
    plans.mkdir()
    fired = arm(plans, ":".join((point, "1", action)))
    with start(tmp_path, PYTHONPATH=FAULTY, CPUSERVE_FAULT=str(plans)) as server:
        wait_until(fired.exists, f"{point} was not reached")
        keeps = point != "packed.write" or action == SHORT
        line = "are kept for the next start in" if keeps else NOT_KEPT
        wait_until(lambda: line in server.log(), server.log)
        server.new_log()
        server.settled_as(healthy)
        assert_server_sane(server)
        assert len(kept(tmp_path)) == keeps
        server.stop()
    with start(tmp_path) as server:
        wait_until(lambda: len(kept(tmp_path)) == 1, server.log)
        server.settled_as(healthy)
        server.new_log()
        assert_server_sane(server)
        server.stop()


# --- faults while the server starts ---------------------------------------------------------------

# What a start goes on without, when it fails once: all of these in one start.
WITHOUT = {
    "system.read": "EIO",
    "tuned.read": "EIO",
    "kv_folder.read": "EIO",
    "kv_scan.read": "EIO",
    "kv_shared.read": "EIO",
    "record.read": "EIO",
    "packed.open": "EIO",
    "packed.read": "EIO",
    "source.sample": "EIO",
    "manager.send": "ECONNREFUSED",
    "page.read": "EIO",
}
# Packed weights that are made anew.
ANEW = (("packed.load", "EIO"), ("packed.open", "EMFILE"))
KNOWN_WITHOUT = (
    "is damaged and left out",
    "tuned.* is ignored, because",
    "packed weights.* (is|are) made anew",
    "the service manager cannot be told",
    "GET /: 507 ",
)
ON_DISK = ("--weights-on-disk", "always")


def options_of(folder):
    return [
        *("--served-model-name", "m", "--max-model-len", 512, "--kv-cache-memory", "256KiB"),
        *("--prefix-cache-dir", folder / "prefixes", "--files-dir", folder / "files"),
        *("--omp-threads-bind", "nobind", *ON_DISK),
    ]


def test_a_start_goes_on_without_what_cannot_be_read(tmp_path):
    first, plans = tmp_path / "first", tmp_path / "plans"
    first.mkdir()
    plans.mkdir()
    cache = {"CPUSERVE_CACHE": str(tmp_path / "cache")}
    with watched_server(first, tiny_model("llama"), *options_of(first), **cache) as server:
        assert sent_file(server, b"{}\n")[0] == 200
        assert server.ask("/v1/completions", KEPT)[0] == 200
        server.stop()
    for point, action in WITHOUT.items():
        arm(plans, f"{point}:1:{action}")
    options = [*options_of(first), "--kv-tiers", f"shared={first / 'prefixes'}"]
    options[options.index(first / "prefixes")] = tmp_path / "prefixes"
    faults = {"PYTHONPATH": FAULTY, "CPUSERVE_FAULT": str(plans), "NOTIFY_SOCKET": "/nowhere"}
    with watched_server(tmp_path, tiny_model("llama"), *options, **faults, **cache) as server:
        assert server.ask("/", headers={"accept": "text/html"})[0] in (200, 507)
        assert server.ask("/v1/completions", KEPT)[0] == 200
        for request in (text, chat, grammar):
            assert {status for status, _ in request(server)} == {200}
        assert {path.stem for path in plans.glob("*.fired")} == set(WITHOUT)
        server.settle()
        assert_server_sane(server)
        server.stop()
        lines = [line for line in server.log().splitlines() if "WARNING" in line or "ERROR" in line]
        known = re.compile("|".join(KNOWN_WITHOUT))
        assert [line for line in lines if not known.search(line)] == []
    for point, action in ANEW:
        fired = arm(plans, ":".join((point, "1", action)))
        with watched_server(tmp_path, tiny_model("llama"), *options, **faults, **cache) as server:
            assert {status for status, _ in text(server)} == {200}
            assert fired.exists()
            server.stop()
            assert "made anew" in server.log()


DIRECTORIES = [
    (point, action)
    for point in ("secret.read", "secret.write", "kv_folder.write")
    for action in POINTS[point].actions
]


def with_prefixes(folder, **faults):
    options = ["--prefix-cache-dir", folder / "prefixes", "--max-model-len", 512]
    return watched_server(folder, tiny_model("llama"), *options, **faults)


@pytest.fixture(scope="module")
def with_directory(tmp_path_factory):
    """Return a server that uses its directory, and has settled."""
    with with_prefixes(tmp_path_factory.mktemp("directory")) as server:
        server.settle()
        server.stop()
    return server


@pytest.mark.parametrize(("point", "action"), DIRECTORIES)
def test_a_start_goes_on_without_a_directory_that_cannot_be_used(
    point, action, with_directory, tmp_path
):
    faults = {"PYTHONPATH": FAULTY, "CPUSERVE_FAULT": f"{point}:1:{action}"}
    with with_prefixes(tmp_path, **faults) as server:
        server.settled_as(with_directory)
        server.new_log()
        assert_server_sane(server)
        server.stop()


BLIND = ("processor_file.read",)


@pytest.mark.parametrize("reader", ["the engine's plan", "the front end"])
@pytest.mark.parametrize("point", BLIND)
def test_a_model_whose_settings_for_pictures_cannot_be_read_serves_text(point, reader, tmp_path):
    number = 1 if reader == "the engine's plan" else 5  # each reads four files
    options = ("--max-model-len", 256, "--kv-cache-memory", "1MiB", "--omp-threads-bind", "nobind")
    faults = {"PYTHONPATH": FAULTY, "CPUSERVE_FAULT": f"{point}:{number}:EIO"}
    model = write_served_model(tmp_path / "model").path
    with watched_server(tmp_path, model, *options, **faults) as server:
        assert "cannot be read: [Errno 5] Input/output error (on purpose)" in server.log()
        server.settle()
        assert {status for status, _ in chat(server)} == {200}
        ((status, body),) = seen(server)
        assert status == 400, body
        assert_server_sane(server)
        server.stop()


# What no start goes on without.
TLS = ("--ssl-certfile", f"{FILES}/first.crt", "--ssl-keyfile", f"{FILES}/first.key")
REFUSED = (
    ("options.read", "EIO", ("--config", "FOLDER/options.yaml")),
    ("template_file.read", "EIO", ("--chat-template", "FOLDER/template.jinja")),
    ("weights.read", "EIO", ()),
    ("weights.map", "EMFILE", ()),
    ("weights.map", "ENOMEM", ()),
    ("engine.map", "ENOMEM", ()),
    ("children.start", "EAGAIN", ()),
    ("keys.read", "EIO", ("--api-key-file", "FOLDER/keys")),
    ("keys.read", "EMFILE", ("--api-key-file", "FOLDER/keys")),
    ("audit.open", "EIO", ("--audit", "FOLDER/audit")),
    ("certificate.read", "EIO", TLS),
    ("certificate.read", "EMFILE", TLS),
    ("packed.allocate", "ENOSPC", ON_DISK),
    ("packed.sync", "EIO", ON_DISK),
    ("source.read", "EIO", ON_DISK),
    ("mapped.sample", "EIO", ()),
    ("mapped.sample", "EIO", ON_DISK),
    ("fingerprint.read", "EIO", ("--prefix-cache-dir", "FOLDER/prefixes")),
)


@pytest.mark.parametrize(("point", "action", "options"), REFUSED)
def test_a_start_is_refused_in_one_line(point, action, options, tmp_path):
    (tmp_path / "options.yaml").write_text("seed: 1\n")
    (tmp_path / "keys").write_text("somebody 0123456789abcdef0123456789abcdef\n")
    (tmp_path / "template.jinja").write_text("x")
    options = [option.replace("FOLDER", str(tmp_path)) for option in options]
    faults = {"PYTHONPATH": FAULTY, "CPUSERVE_FAULT": f"{point}:1:{action}"}
    server = WatchedServer(tmp_path, tiny_model("llama"), *options, **faults)
    try:
        assert server.process.wait(PATIENCE_S) == 2, server.log()
    finally:
        server.close()
    *_, last = server.log().splitlines()
    assert last.startswith("cpuserve: error: "), server.log()
    assert "Traceback" not in server.log(), server.log()
    assert "(on purpose)" in last or os.strerror(getattr(errno, action)) in last, last
    assert not server.unfinished()
