"""The server as processes: start, signals, deaths. The engine is the fake one, its process real."""

import errno
import http.client
import json
import logging
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from cpuserve.entrypoints import serve as serving
from cpuserve.entrypoints.listener import MOST_FILES, raise_file_limit
from cpuserve.entrypoints.serve import HttpOptions, bound, url_of
from cpuserve.errors import ConfigError
from tests.helpers.children import child_options
from tests.helpers.tiny import tiny_model


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


class Served:
    """A server process and what can be done with it."""

    def __init__(self, model="fake", uds=None, drain_s=3.0, keys=(), replicas=1, **config):
        self.port = free_port()
        self.uds = uds
        self._connections = []
        tiny = str(tiny_model("llama"))
        config = {"max_model_len": 1000, "kv_blocks": 512, **config}
        config = {"tokenizer_path": tiny, "served_model_names": ["fake"], **config}
        options = {"model": model, "port": self.port, "uds": uds, "drain_s": drain_s}
        options = {**options, "keys": list(keys), "replicas": replicas}
        options = json.dumps({**options, "config": config})
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.api.serve_fake", options],
            **child_options(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.engine_pid = int(self.process.stdout.readline().split()[1])

    def ready(self):
        """Wait until it serves."""
        line = self.process.stdout.readline()
        assert line.startswith("ready "), self.process.stderr.read()
        self.url = line.split()[1]
        return self

    def connect(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        if self.uds:
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.connect(self.uds)
        self._connections.append(connection)
        return connection

    def close(self):
        """Kill what still runs and close every connection."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        for connection in self._connections:
            connection.close()

    def get(self, path):
        connection = self.connect()
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read()
        connection.close()
        return response.status, body

    def post(self, connection=None, **fields):
        """POST /v1/completions; the response, unread."""
        connection = connection or self.connect()
        body = json.dumps({"prompt": [11, 12, 13], "ignore_eos": True, **fields})
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", body, headers)
        return connection.getresponse()

    def stop(self, number=signal.SIGTERM):
        self.process.send_signal(number)

    def ends_with(self, code, within_s):
        """The process ends in time with `code`, and so has its engine."""
        start = time.monotonic()
        _, err = self.process.communicate(timeout=within_s + 5)
        took = time.monotonic() - start
        assert self.process.returncode == code, err
        assert took < within_s, f"took {took:.1f} s"
        assert gone(self.engine_pid)
        assert "Traceback" not in err, err
        return err


def gone(pid, timeout_s=2.0):
    """The process ends, or has been reaped."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


@contextmanager
def served(*args, **kwargs):
    server = Served(*args, **kwargs)
    try:
        yield server
    finally:
        server.close()


def events(text):
    lines = [line for line in text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]", lines[-3:]
    return [json.loads(line[6:]) for line in lines[:-1]]


def test_an_idle_server_answers_where_it_should_and_ends_at_once_with_0():
    cpu = min(os.sched_getaffinity(0))
    with served(frontend_cpus=[cpu]) as server:
        server.ready()
        assert server.get("/health") == (200, b"")
        body = json.loads(server.post(max_tokens=5).read())
        assert body["usage"]["completion_tokens"] == 5
        assert os.sched_getaffinity(server.process.pid) == {cpu}
        assert listening(server.process.pid) == [("127.0.0.1", server.port)]
        assert listening(server.engine_pid) == []
        assert "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text()
        server.stop()
        server.ends_with(0, within_s=2)


def listening(pid):
    """Addresses on which the process accepts connections."""
    connections = psutil.Process(pid).net_connections("inet")
    return [tuple(c.laddr) for c in connections if c.status == psutil.CONN_LISTEN]


def test_while_loading_health_is_503_and_a_signal_ends_it():
    with served("fake:hang") as server:
        status, body = None, b""
        end = time.monotonic() + 10
        while status is None and time.monotonic() < end:
            try:
                status, body = server.get("/health")
            except OSError:
                time.sleep(0.02)
        assert status == 503
        assert "loading" in json.loads(body)["error"]["message"]
        response = server.post()
        assert response.status == 503
        server.stop()
        server.ends_with(0, within_s=3)


def test_a_running_stream_may_finish_after_sigterm():
    with served("fake:slow") as server:
        server.ready()
        response = server.post(stream=True, max_tokens=40)
        first = response.readline()
        server.stop()
        text = (first + response.read()).decode()
        assert events(text)[-1]["choices"][0]["finish_reason"] == "length"
        server.ends_with(0, within_s=4)


def test_a_stream_that_takes_too_long_is_ended_with_an_error():
    with served("fake:slow", drain_s=0.3) as server:
        server.ready()
        response = server.post(stream=True, max_tokens=900)
        first = response.readline()
        start = time.monotonic()
        server.stop()
        text = (first + response.read()).decode()
        assert events(text)[-1]["error"]["code"] == 503
        server.ends_with(0, within_s=3)
        assert time.monotonic() - start < 4


def test_while_it_stops_new_requests_are_refused():
    with served("fake:slow", drain_s=1.0) as server:
        server.ready()
        idle = server.connect()
        idle.request("GET", "/health")
        idle.getresponse().read()
        response = server.post(stream=True, max_tokens=900)
        response.readline()
        server.stop()
        time.sleep(0.4)
        with pytest.raises((OSError, http.client.HTTPException)):
            server.get("/health")
        with pytest.raises((OSError, http.client.HTTPException)):
            server.post(idle)
        server.ends_with(0, within_s=4)


def test_a_second_signal_ends_it_at_once():
    with served("fake:slow", drain_s=60) as server:
        server.ready()
        response = server.post(stream=True, max_tokens=900)
        response.readline()
        server.stop(signal.SIGINT)
        time.sleep(0.3)
        assert server.process.poll() is None
        server.stop(signal.SIGINT)
        server.ends_with(130, within_s=1)


def test_when_the_engine_dies_streams_get_an_error_and_the_server_ends_with_1():
    with served("fake:slow") as server:
        server.ready()
        response = server.post(stream=True, max_tokens=900)
        first = response.readline()
        os.kill(server.engine_pid, signal.SIGKILL)
        text = (first + response.read()).decode()
        error = events(text)[-1]["error"]
        assert error["code"] == 503
        assert "SIGKILL" in error["message"]
        assert server.get("/health")[0] == 503
        assert "SIGKILL" in server.ends_with(1, within_s=5)


def test_when_the_engine_crashes_whole_answers_are_503():
    with served("fake:exit:4") as server:
        server.ready()
        response = server.post(max_tokens=50)
        assert response.status == 503
        assert "exit code 7" in json.loads(response.read())["error"]["message"]
        server.ends_with(1, within_s=5)


def test_a_failed_step_fails_its_requests_only():
    with served("fake:raise:3") as server:
        server.ready()
        response = server.post(max_tokens=50)
        assert response.status == 500
        assert json.loads(response.read())["error"]["code"] == 500
        assert json.loads(server.post(max_tokens=5).read())["usage"]["completion_tokens"] == 5
        server.stop()
        server.process.communicate(timeout=5)
        assert server.process.returncode == 0


def test_when_the_front_end_is_killed_the_engine_ends():
    with served("fake:slow") as server:
        server.ready()
        server.process.kill()
        assert gone(server.engine_pid)


@pytest.mark.parametrize(
    ("model", "line"),
    [("fake:startup", "the model is not there"), ("fake:broken", "ZeroDivisionError: a bug")],
)
def test_an_engine_that_cannot_start_is_a_startup_error(model, line):
    with served(model) as server:
        _, err = server.process.communicate(timeout=20)
        assert server.process.returncode == 2
        assert line in err.splitlines()[-1]
        assert err.splitlines()[-1].startswith("cpuserve: error: ")
        assert gone(server.engine_pid)


def test_a_missing_tokenizer_is_a_startup_error():
    with served(tokenizer_path="/nonexistent/model") as server:
        _, err = server.process.communicate(timeout=20)
        assert server.process.returncode == 2, err
        assert "/nonexistent/model" in err.splitlines()[-1]
        assert "Traceback" not in err
        assert gone(server.engine_pid)


def test_a_missing_chat_template_file_is_a_startup_error():
    with served(chat_template="/nonexistent/template.jinja") as server:
        _, err = server.process.communicate(timeout=20)
        assert server.process.returncode == 2, err
        assert "template.jinja" in err.splitlines()[-1]


def test_a_unix_socket_serves_and_is_removed(tmp_path):
    path = tmp_path / "api.sock"
    with served(uds=str(path)) as server:
        server.ready()
        assert server.url == f"unix:{path}"
        assert server.get("/health")[0] == 200
        server.stop()
        server.ends_with(0, within_s=2)
    assert not path.exists()


def test_metrics_count_exactly_and_are_zero_after_aborts():
    with served("fake:slow") as server:
        server.ready()
        for _ in range(3):
            server.post(max_tokens=4).read()
        gone_client = server.connect()
        response = server.post(gone_client, stream=True, max_tokens=900)
        response.readline()
        response.close()
        gone_client.close()
        end = time.monotonic() + 5
        while 'finished_reason="abort",model_name="fake"} 1.0' not in (
            text := server.get("/metrics")[1].decode()
        ):
            assert time.monotonic() < end, text
            time.sleep(0.02)
        labels = '{engine="0",model_name="fake"}'
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
        assert values[f"vllm:prompt_tokens_total{labels}"] == "12.0"
        assert values[f"vllm:num_requests_running{labels}"] == "0.0"
        assert values[f"vllm:num_requests_waiting{labels}"] == "0.0"
        assert values[f"vllm:kv_cache_usage_perc{labels}"] == "0.0"
        assert values[f"vllm:request_generation_tokens_count{labels}"] == "4.0"
        assert float(values[f"vllm:iteration_tokens_total_count{labels}"]) >= 12
        steps = float(values[f"vllm:iteration_tokens_total_sum{labels}"])
        generated = float(values[f"vllm:generation_tokens_total{labels}"])
        assert 12 + generated <= steps <= 12 + generated + 20
        server.stop()
        server.ends_with(0, within_s=2)


def test_a_taken_port_is_told_in_one_line():
    with bound(HttpOptions(port=0)) as listener:
        port = listener.getsockname()[1]
        assert url_of(listener) == f"http://127.0.0.1:{port}"
        with (
            pytest.raises(ConfigError, match=f"port {port}: Address already in use.*--port"),
            bound(HttpOptions(port=port)),
        ):
            pass


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid", "a" * 300])
def test_an_address_of_another_machine_is_told_in_one_line(host):
    with (
        pytest.raises(ConfigError, match="cannot listen on"),
        bound(HttpOptions(host=host, port=0)),
    ):
        pass


def test_without_descriptors_connections_are_closed_and_one_line_says_so(monkeypatch, caplog):
    accept, failures = socket.socket.accept, iter([True, False] * 2 + [False])

    def scarce(self):
        if next(failures):
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", scarce)
    with (
        caplog.at_level(logging.WARNING, "cpuserve"),
        bound(HttpOptions(port=0)) as listener,
    ):
        before = psutil.Process().num_fds()
        for _ in range(2):
            with socket.create_connection(listener.getsockname()) as client:
                client.settimeout(5)
                select.select([listener], [], [], 5)
                with pytest.raises(BlockingIOError):
                    listener.accept()
                assert client.recv(1) == b""
        assert psutil.Process().num_fds() == before
        with socket.create_connection(listener.getsockname()):
            select.select([listener], [], [], 5)
            listener.accept()[0].close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "ulimit -n" in caplog.text


def test_the_limit_of_descriptors_is_raised_as_far_as_may_be(monkeypatch):
    set_to = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: set_to.append(limits))
    for limits in ((1024, 4096), (1024, 1 << 20), (1024, resource.RLIM_INFINITY), (4096, 4096)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        raise_file_limit()
    most = [4096, MOST_FILES, MOST_FILES]
    assert [soft for soft, _ in set_to] == most
    assert [hard for _, hard in set_to] == [4096, 1 << 20, resource.RLIM_INFINITY]


def test_a_stale_unix_socket_is_replaced_and_a_live_one_is_not(tmp_path):
    path = tmp_path / "s"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    with bound(HttpOptions(uds=str(path))):
        with (
            pytest.raises(ConfigError, match="Address already in use"),
            bound(HttpOptions(uds=str(path))),
        ):
            pass
        assert path.exists()
    assert not path.exists()


def test_a_file_in_the_place_of_a_socket_stays(tmp_path):
    path = tmp_path / "precious"
    path.write_text("data")
    with (
        pytest.raises(ConfigError, match="cannot listen on the socket"),
        bound(HttpOptions(uds=str(path))),
    ):
        pass
    assert path.read_text() == "data"


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        ({"host": "127.0.0.1"}, False),
        ({"host": "localhost"}, False),
        ({"host": "::1"}, False),
        ({"host": "0.0.0.0"}, True),
        ({"host": "::"}, True),
        ({"host": "192.168.0.1"}, True),
        ({"host": "0.0.0.0", "api_keys": ("k",)}, False),
        ({"host": "0.0.0.0", "uds": "/run/x"}, False),
    ],
    ids=str,
)
def test_an_open_address_without_a_key_is_warned_about(caplog, options, warns):
    with caplog.at_level(logging.WARNING, logger="cpuserve"):
        serving._warn_if_open(HttpOptions(**options))
    assert bool(caplog.records) == warns
