"""The Ray Serve application on one local node, deployed with `serve run`, as users do.

`.ci/run ray` installs Ray and runs this.
"""

import http.client
import importlib.util
import json
import os
import secrets
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.api.server_process import events, free_port
from tests.helpers.children import child_options
from tests.helpers.patience import PATIENCE_S, wait_until
from tests.helpers.tiny import tiny_model

if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed: run .ci/run ray", allow_module_level=True)

APP = "cpuserve.integrations.ray_serve:app"
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # A new node requires a token from every program that connects to its address.
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    # How often Ray counts requests; the default of 10 s is long for a test.
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
}


ARGUMENTS = """
from cpuserve.base.errors import ConfigError
from cpuserve.integrations.ray_serve import Scaling, _split, app

fixed = _split({"num_replicas": "3", "num_cpus": 4, "model": "m"})
assert fixed == (Scaling(num_cpus=4, num_replicas=3), {"model": "m"}), fixed
assert "autoscaling_config" not in fixed[0].deployment()
assert fixed[0].deployment()["ray_actor_options"] == {"num_cpus": 4}
scaled = Scaling(min_replicas=0, max_replicas=4).deployment()["autoscaling_config"]
assert scaled == {
    "min_replicas": 0,
    "max_replicas": 4,
    "target_ongoing_requests": 8,
    "look_back_period_s": 30,
    "upscale_delay_s": 30,
    "downscale_delay_s": 600,
}, scaled
assert _split({"upscale_delay_s": "0", "target_ongoing_requests": "1.5"})[0].upscale_delay_s == 0
for wrong in (
    {"num_cpus": "0"},
    {"max_replicas": "many"},
    {"downscale_delay_s": "-1"},
    {"look_back_period_s": "nan"},
    {"max_model_length": "8k"},
):
    try:
        app(wrong)
    except ConfigError as error:
        print(error)
"""


def test_arguments_are_rays_or_cpuserves_and_wrong_ones_are_named():
    command = [sys.executable, "-W", "ignore", "-c", ARGUMENTS]
    done = subprocess.run(
        command, **child_options(), capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    few, many, negative, no_number, name = done.stdout.splitlines()
    assert "num_cpus=0: give a whole number above 0" in few
    assert "max_replicas=many: give a whole number above 0" in many
    assert "downscale_delay_s=-1: give a number 0 or more" in negative
    assert "look_back_period_s=nan: give a number above 0" in no_number
    assert "max_model_len" in name


def engines_of(process):
    """Return the engine processes among the descendants of Ray's processes."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            if "cpuserve.engine.child" in " ".join(child.cmdline()):
                found.append(child.pid)
        except psutil.Error:
            continue
    return found


MODEL = {"model": tiny_model("llama"), "served_model_name": "tiny", "max_model_len": 100}


class OnRay:
    """A Ray node with two CPUs that runs the application behind Ray's proxy."""

    def __init__(self):
        self.port = free_port()
        command = [sys.executable, "-m", "tests.integrations.serve_on_ray", str(self.port)]
        self.process = subprocess.Popen(
            command,
            **child_options(**ENVIRONMENT),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        # A start that hangs must not outlive the test that waits for it.
        watchdog = threading.Timer(PATIENCE_S, self.process.kill)
        watchdog.start()
        log = []
        for line in self.process.stdout:
            log.append(line)
            if line.startswith("ready "):
                break
        watchdog.cancel()
        assert "".join(log[-1:]).startswith("ready "), "".join(log)
        self.address = log[-1].split()[1]
        # Ray writes the logs of the replicas here; a full pipe would block it.
        self._reader = threading.Thread(target=self.process.stdout.read)
        self._reader.start()

    def serve_run(self, **arguments):
        """Run `serve run --non-blocking APP NAME=VALUE...` until the application serves."""
        serve = Path(sys.executable).with_name("serve")
        command = [str(serve) if serve.exists() else shutil.which("serve"), "run"]
        command += ["--non-blocking", "--address", self.address, APP]
        done = subprocess.run(
            [*command, *(f"{name}={value}" for name, value in arguments.items())],
            **child_options(**ENVIRONMENT),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def ask(self, method, path, **body):
        """Send a request; return (status, headers, body)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            text = json.dumps(body) if body else None
            connection.request(method, path, text, {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read().decode()
        finally:
            connection.close()

    def chat(self, **fields):
        message = {"role": "user", "content": "hi"}
        fields = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}
        return self.ask("POST", "/v1/chat/completions", messages=[message], **fields)

    def close(self):
        if self.process.poll() is None:
            self.process.stdin.close()
            try:
                self.process.wait(timeout=PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def on_ray():
    server = OnRay()
    try:
        server.serve_run(**MODEL, num_replicas=2)
        yield server
    finally:
        server.close()


def test_a_streamed_chat_passes(on_ray):
    status, headers, text = on_ray.chat(stream=True, stream_options={"include_usage": True})
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    chunks = events(text)
    assert chunks[-1]["usage"]["completion_tokens"] == 8
    streamed = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks[:-1])
    whole = json.loads(on_ray.chat()[2])
    assert whole["choices"][0]["message"]["content"] == streamed
    assert whole["model"] == "tiny"


def test_both_replicas_answer_and_each_has_a_core_of_its_own(on_ray):
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: on_ray.chat(max_tokens=60), range(24)))
    assert {status for status, _, _ in answers} == {200}
    engines = engines_of(on_ray.process)
    assert len(engines) == 2
    used = [sum(psutil.Process(pid).cpu_times()[:2]) for pid in engines]
    assert min(used) > 0
    if len(os.sched_getaffinity(0)) > 1:
        masks = [set(psutil.Process(pid).cpu_affinity()) for pid in engines]
        assert not masks[0] & masks[1]


def test_errors_keep_their_status_and_flags_their_meaning(on_ray):
    long = [{"role": "user", "content": "hello " * 200}]
    status, _, text = on_ray.ask("POST", "/v1/chat/completions", messages=long)
    assert status == 400
    assert "100" in json.loads(text)["error"]["message"]
    assert on_ray.ask("GET", "/v1/models")[0] == 200


def test_a_dead_engine_is_replaced_and_requests_go_on(on_ray):
    before = set(engines_of(on_ray.process))
    victim = min(before)
    psutil.Process(victim).kill()

    def replaced():
        now = set(engines_of(on_ray.process))
        return len(now) == 2 and victim not in now

    wait_until(replaced, "the replica did not come back", poll_s=0.2)
    assert set(engines_of(on_ray.process)) & before, "the other replica was left alone"
    assert on_ray.chat()[0] == 200


@contextmanager
def load(server, streams):
    """Keep `streams` chats running: when one ends, start the next."""
    end = threading.Event()

    def ask():
        statuses = []
        while not end.is_set():
            statuses.append(server.chat(stream=True, max_tokens=80)[0])
        return statuses

    with ThreadPoolExecutor(streams) as pool:
        asked = [pool.submit(ask) for _ in range(streams)]
        try:
            yield
        finally:
            end.set()
        assert {status for thread in asked for status in thread.result()} == {200}


def count_becomes(server, count):
    """Wait until `count` engines run."""
    wait_until(
        lambda: len(engines_of(server.process)) == count,
        lambda: f"{len(engines_of(server.process))} engines",
        poll_s=0.2,
    )


def test_replicas_come_with_load_and_go_without_it(on_ray):
    """Run this test last: it replaces the deployment of two replicas by one that scales."""
    on_ray.serve_run(
        **MODEL,
        min_replicas=1,
        max_replicas=2,
        target_ongoing_requests=1,
        look_back_period_s=3,
        upscale_delay_s=1,
        downscale_delay_s=1,
    )
    count_becomes(on_ray, 1)
    with load(on_ray, 4):
        count_becomes(on_ray, 2)
        assert on_ray.chat()[0] == 200
    count_becomes(on_ray, 1)
    assert on_ray.chat()[0] == 200
