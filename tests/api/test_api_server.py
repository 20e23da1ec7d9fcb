"""Start, signals and crashes of the server, with real processes; the engine's model is fake."""

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
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from cpuserve.api.http.listener import MOST_FILES, open_listener, raise_file_limit, url_of
from cpuserve.api.lifecycle import serve, startup_server
from cpuserve.api.lifecycle.signals import stop_signals
from cpuserve.config.server import ServerOptions
from cpuserve.errors import ConfigError
from cpuserve.serving.load_progress import LoadProgress
from tests.api.fakes import Api
from tests.helpers.children import child_options
from tests.helpers.patience import PATIENCE_S, wait_gone, wait_until
from tests.helpers.tiny import tiny_model

LONG_S = 600.0  # beyond every wait of a test: who waits for this to pass fails


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


class Served:
    """A server process, with methods to send requests and to end it."""

    def __init__(
        self,
        model="fake",
        uds=None,
        drain_s=LONG_S,
        drain_delay_s=0.0,
        keys=(),
        replicas=1,
        restart=True,
        limits=(),
        port=None,
        download="none",
        also=None,
        **config,
    ):
        self.port = port or free_port()
        self.uds = uds
        self._connections = []
        tiny = str(tiny_model("llama"))
        config = {"max_model_len": 1000, "kv_blocks": 512, **config}
        config = {"tokenizer_path": tiny, "served_model_names": ["fake"], **config}
        options = {"model": model, "port": self.port, "uds": uds, "drain_s": drain_s}
        options |= {"drain_delay_s": drain_delay_s, "keys": list(keys), "replicas": replicas}
        options |= {"restart": restart, "limits": limits, "download": download}
        options |= {"also": also}
        options = json.dumps({**options, "config": config})
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.api.serve_fake", options],
            **child_options(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout.readline() == "preparing\n"
        if download == "none":
            self.another_engine()

    def another_engine(self):
        """Return the pid of the next engine that starts; `ends_with` also waits for its end."""
        self.engine_pid = int(self.process.stdout.readline().split()[1])
        return self.engine_pid

    def ready(self):
        """Wait until the server serves requests."""
        line = self.process.stdout.readline()
        assert line.startswith("ready "), self.process.stderr.read()
        self.url = line.split()[1]
        return self

    def connect(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
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
        """Send a POST to /v1/completions and return the response without reading its body."""
        connection = connection or self.connect()
        body = json.dumps({"prompt": [11, 12, 13], "ignore_eos": True, **fields})
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", body, headers)
        return connection.getresponse()

    def stop(self, number=signal.SIGTERM):
        self.process.send_signal(number)

    def ends_with(self, code):
        """The process ends with `code`, and so does its engine."""
        _, err = self.process.communicate(timeout=PATIENCE_S)
        assert self.process.returncode == code, err
        wait_gone(self.engine_pid)
        assert "Traceback" not in err, err
        return err


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
        server.ends_with(0)


def listening(pid):
    """Return the addresses on which the process accepts connections."""
    connections = psutil.Process(pid).net_connections("inet")
    return [tuple(c.laddr) for c in connections if c.status == psutil.CONN_LISTEN]


def test_while_loading_health_is_503_and_a_signal_ends_it():
    with served("fake:hang") as server:
        wait_until(lambda: listening(server.process.pid))
        status, body = server.get("/health")
        assert status == 503
        assert "loading" in json.loads(body)["error"]["message"]
        response = server.post()
        assert response.status == 503
        server.stop()
        server.ends_with(0)


def test_while_downloading_health_is_503_with_progress_and_live_is_200():
    with served(download="until a line comes") as server:
        wait_until(
            lambda: b"owner" not in server.get("/health")[1] and b"40" in server.get("/health")[1]
        )
        status, body = server.get("/health")
        assert status == 503
        health = json.loads(body)
        message = health.pop("error")["message"]
        assert message == "The model is loading (download 40 %)"
        assert health == {"status": "loading", "stage": "download", "done": 40, "total": 100}
        assert server.get("/ping?x=1") == (503, body)
        assert server.get("/live") == (200, b"")
        big = server.connect()
        big.request("POST", "/v1/chat/completions", b"x" * 1_000_000)
        refused = big.getresponse()
        assert refused.status == 503
        assert int(refused.headers["retry-after"]) > 0
        assert json.loads(refused.read())["error"]["message"] == message
        head = server.connect()
        head.request("HEAD", "/health")
        assert head.getresponse().status == 503
        # A client that sends its request slowly is answered after the front end has taken over.
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as slow:
            slow.sendall(b"GET /health HTTP/1.1\r\n")
            server.get("/live")
            server.process.stdin.write("\n")
            server.process.stdin.flush()
            server.another_engine()
            server.ready()
            assert server.get("/health") == (200, b"")
            slow.sendall(b"host: a\r\n\r\n")
            assert slow.makefile("rb").readline() == b"HTTP/1.1 503 Service Unavailable\r\n"
        assert server.post(max_tokens=1).status == 200
        server.stop()
        server.ends_with(0)


def test_both_that_answer_on_the_port_say_the_same_while_loading():
    api = Api()
    api.context.ready, api.context.loading = False, LoadProgress("load", 1, 4)
    for path in ("/health", "/ping", "/live", "/health/"):
        shown = api.get(path)
        answer = startup_server._response(path.rstrip("/"), api.context.loading)
        assert answer.status.startswith(f"{shown.status_code} ")
        assert answer.body == shown.content
        assert answer.retry == ("retry-after" in shown.headers)
    answer = startup_server._response("/v1/completions", api.context.loading)
    assert answer.body == api.complete().content


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda s: s.name)
def test_a_signal_ends_a_download_at_once(number):
    with served(download="until a line comes") as server:
        wait_until(lambda: b"40" in server.get("/health")[1])
        server.stop(number)
        _, err = server.process.communicate(timeout=PATIENCE_S)
        assert server.process.returncode == 0, err
        assert err == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_download_of_a_further_model_at_once(number):
    with served(also="until a line comes") as server:
        server.ready()
        connection = server.connect()
        body = json.dumps({"model": "two", "prompt": [11]})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        assert server.process.stdout.readline() == "preparing\n"
        server.stop(number)
        response = connection.getresponse()
        assert response.status == 503
        assert "shutting down" in json.loads(response.read())["error"]["message"]
        server.ends_with(0)


def test_a_model_that_is_refused_is_one_line_and_frees_the_port():
    with served(download="refuse") as server:
        _, err = server.process.communicate(timeout=PATIENCE_S)
        assert server.process.returncode == 2
        assert err == "cpuserve: error: model owner/model cannot be fetched\n"
        with open_listener(ServerOptions(port=server.port)):
            pass


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT], ids=lambda s: s.name
)
def test_a_running_stream_may_finish_after_a_signal(number):
    with served("fake:slow") as server:
        server.ready()
        response = server.post(stream=True, max_tokens=40)
        first = response.readline()
        for pid in (server.engine_pid, server.process.pid):  # a terminal signals both
            os.kill(pid, number)
        text = (first + response.read()).decode()
        assert events(text)[-1]["choices"][0]["finish_reason"] == "length"
        server.ends_with(0)


def test_a_stream_that_takes_too_long_is_ended_with_an_error():
    with served("fake:slow", drain_s=0.3) as server:
        server.ready()
        response = server.post(stream=True, max_tokens=900)
        first = response.readline()
        server.stop()
        text = (first + response.read()).decode()
        assert events(text)[-1]["error"]["code"] == "service_unavailable"
        server.ends_with(0)


def test_while_it_stops_new_requests_are_refused():
    with served("fake:slow", drain_s=1.0) as server:
        server.ready()
        idle = server.connect()
        idle.request("GET", "/health")
        idle.getresponse().read()
        response = server.post(stream=True, max_tokens=900)
        response.readline()
        server.stop()
        wait_until(lambda: not listening(server.process.pid))
        with pytest.raises((OSError, http.client.HTTPException)):
            server.get("/health")
        with pytest.raises((OSError, http.client.HTTPException)):
            server.post(idle)
        server.ends_with(0)


@pytest.mark.parametrize("drain_delay_s", [0, LONG_S], ids=["draining", "in the delay"])
def test_a_second_signal_ends_it_with_an_error_in_each_stream(drain_delay_s):
    with served("fake:slow", drain_delay_s=drain_delay_s) as server:
        server.ready()
        responses = [server.post(stream=True, max_tokens=900) for _ in range(3)]
        begun = [response.readline() for response in responses]
        server.stop(signal.SIGINT)
        if drain_delay_s:
            wait_until(lambda: server.get("/health")[0] == 503)
        else:
            wait_until(lambda: not listening(server.process.pid))
        server.stop(signal.SIGINT)
        for first, response in zip(begun, responses, strict=True):
            error = events((first + response.read()).decode())[-1]["error"]
            assert error["code"] == "service_unavailable"
        server.ends_with(130)


def test_during_the_drain_delay_health_is_503_and_requests_are_answered():
    with served("fake:slow", drain_delay_s=LONG_S) as server:
        server.ready()
        kept = server.connect()
        assert server.post(kept, max_tokens=1).read()
        server.stop()
        wait_until(lambda: server.get("/health")[0] == 503)
        assert json.loads(server.get("/health")[1])["status"] == "draining"
        assert server.get("/live")[0] == 200
        response = server.post(kept, stream=True, max_tokens=4)
        assert response.headers["connection"] == "close"
        assert server.post(max_tokens=2).status == 200
        assert events(response.read().decode())[-1]["choices"][0]["finish_reason"] == "length"
        server.stop()
        server.ends_with(143)


def test_after_the_drain_delay_the_port_closes_and_streams_go_on():
    with served("fake:slow", drain_delay_s=0.2) as server:
        server.ready()
        response = server.post(stream=True, max_tokens=100)
        first = response.readline()
        server.stop()
        wait_until(lambda: not listening(server.process.pid))
        with pytest.raises(OSError, match="refused"):
            server.get("/health")
        text = (first + response.read()).decode()
        assert events(text)[-1]["choices"][0]["finish_reason"] == "length"
        server.ends_with(0)


def test_a_request_that_is_still_coming_is_answered_before_the_end():
    with served() as server:
        server.ready()
        body = json.dumps({"prompt": [11, 12, 13], "max_tokens": 3}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as client:
            client.sendall(head.encode() + body[:10])
            # The next connection's answer shows that the server has read the beginning.
            assert server.get("/health")[0] == 200
            server.stop()
            wait_until(lambda: not listening(server.process.pid))
            client.sendall(body[10:])
            assert client.makefile("rb").readline() == b"HTTP/1.1 200 OK\r\n"
        server.ends_with(0)


def test_signals_that_were_ignored_at_the_start_stay_ignored(monkeypatch):
    ignored = {signal.SIGHUP: signal.SIG_IGN, signal.SIGINT: signal.SIG_IGN}
    monkeypatch.setattr(signal, "getsignal", lambda n: ignored.get(n, signal.SIG_DFL))
    assert set(stop_signals()) == {signal.SIGINT, signal.SIGTERM, signal.SIGQUIT}


def ends_with_the_engines_death(response):
    """Read a stream whose engine is killed meanwhile, and check the error event at its end."""
    error = events(response.read().decode())[-1]["error"]
    kind = error["type"], error["code"]
    assert kind == ("ServiceUnavailableError", "service_unavailable"), "as outside a stream"
    assert "SIGKILL" in error["message"]


def test_a_killed_engine_is_started_again_and_its_streams_end_with_an_error():
    with served("fake:slow") as server:
        server.ready()
        labels = '{engine="0",model_name="fake"}'
        restarts = f"cpuserve:replica_restarts_total{labels} %.1f"
        assert restarts % 0 in server.get("/metrics")[1].decode()
        response = server.post(stream=True, max_tokens=900)
        response.readline()
        os.kill(server.engine_pid, signal.SIGKILL)
        ends_with_the_engines_death(response)
        server.another_engine()
        wait_until(lambda: server.get("/health") == (200, b""))
        assert json.loads(server.post(max_tokens=5).read())["usage"]["completion_tokens"] == 5
        metrics = server.get("/metrics")[1].decode()
        assert f"vllm:num_requests_running{labels} 0.0" in metrics
        assert f"cpuserve:replica_up{labels} 1.0" in metrics
        assert restarts % 1 in metrics
        server.stop()
        log = server.ends_with(0)
        assert "the engine was killed by SIGKILL" in log
        assert "the engine serves again after" in log


def test_while_a_killed_engine_starts_requests_get_503_with_the_reason(tmp_path):
    with served(f"fake:once:{tmp_path / 'started'}") as server:
        server.ready()
        os.kill(server.engine_pid, signal.SIGKILL)
        server.another_engine()
        status, body = server.get("/health")
        response = server.post()
        assert (status, response.status) == (503, 503)
        assert json.loads(body)["status"] == "restarting"
        for text in (body, response.read()):
            message = json.loads(text)["error"]["message"]
            assert "SIGKILL" in message
            assert "started again" in message
        server.stop()
        server.ends_with(0)


def test_a_stopped_engine_makes_health_503_until_it_goes_on():
    with served("fake:slow", limits=(0.02, 0.3, 1e9)) as server:
        server.ready()
        response = server.post(stream=True, max_tokens=100)
        first = response.readline()
        os.kill(server.engine_pid, signal.SIGSTOP)
        wait_until(lambda: server.get("/health")[0] == 503)
        assert "has not answered for" in json.loads(server.get("/health")[1])["error"]["message"]
        assert server.post().status == 503
        assert server.get("/v1/cpu")[0] == 503
        os.kill(server.engine_pid, signal.SIGCONT)
        wait_until(lambda: server.get("/health")[0] == 200)
        text = (first + response.read()).decode()
        assert events(text)[-1]["choices"][0]["finish_reason"] == "length"


def test_an_engine_that_stays_stopped_is_replaced_and_its_streams_end_with_an_error():
    with served("fake:slow", limits=(0.02, 0.3, 1.0)) as server:
        server.ready()
        response = server.post(stream=True, max_tokens=900)
        first = response.readline()
        os.kill(server.engine_pid, signal.SIGSTOP)
        error = events((first + response.read()).decode())[-1]["error"]
        assert error["type"] == "ServiceUnavailableError"
        assert "has not answered for" in error["message"]
        wait_gone(server.engine_pid)
        server.another_engine()
        wait_until(lambda: server.get("/health") == (200, b""))
        assert json.loads(server.post(max_tokens=5).read())["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_engine_that_dies_again_and_again_while_it_starts_first_ends_the_server(replicas):
    with served("fake:dies", replicas=replicas) as server:
        _, err = server.process.communicate(timeout=PATIENCE_S)
        assert server.process.returncode == 2, err
        assert err.splitlines()[-1].startswith("cpuserve: error: the engine did not start: ")
        assert "exit code 9" in err.splitlines()[-1]
        assert "starting attempt 3 of 3" in err


def test_without_restarts_streams_get_an_error_and_the_server_ends_with_1():
    with served("fake:slow", restart=False) as server:
        server.ready()
        labels = '{engine="0",model_name="fake"}'
        restarts = f"cpuserve:replica_restarts_total{labels} %.1f"
        assert restarts % 0 in server.get("/metrics")[1].decode()
        response = server.post(stream=True, max_tokens=900)
        response.readline()
        os.kill(server.engine_pid, signal.SIGKILL)
        ends_with_the_engines_death(response)
        assert server.get("/health")[0] == 503
        assert "SIGKILL" in server.ends_with(1)


def test_when_the_engine_crashes_whole_answers_are_503():
    with served("fake:exit:4", restart=False) as server:
        server.ready()
        response = server.post(max_tokens=50)
        assert response.status == 503
        assert "exit code 7" in json.loads(response.read())["error"]["message"]
        server.ends_with(1)


def test_a_failed_step_fails_its_requests_only():
    with served("fake:raise:3") as server:
        server.ready()
        response = server.post(max_tokens=50)
        assert response.status == 500
        assert json.loads(response.read())["error"]["code"] == "server_error"
        assert json.loads(server.post(max_tokens=5).read())["usage"]["completion_tokens"] == 5
        server.stop()
        server.process.communicate(timeout=PATIENCE_S)
        assert server.process.returncode == 0


def test_when_the_front_end_is_killed_the_engine_ends():
    with served("fake:slow") as server:
        server.ready()
        server.process.kill()
        wait_gone(server.engine_pid)


@pytest.mark.parametrize(
    ("model", "line"),
    [("fake:startup", "the model is not there"), ("fake:broken", "ZeroDivisionError: a bug")],
)
def test_an_engine_that_cannot_start_is_a_startup_error(model, line):
    with served(model) as server:
        _, err = server.process.communicate(timeout=PATIENCE_S)
        assert server.process.returncode == 2
        assert line in err.splitlines()[-1]
        assert err.splitlines()[-1].startswith("cpuserve: error: ")
        wait_gone(server.engine_pid)


def test_a_missing_tokenizer_is_a_startup_error():
    with served(tokenizer_path="/nonexistent/model") as server:
        _, err = server.process.communicate(timeout=PATIENCE_S)
        assert server.process.returncode == 2, err
        assert "/nonexistent/model" in err.splitlines()[-1]
        assert "Traceback" not in err
        wait_gone(server.engine_pid)


def test_a_missing_tokenizer_ends_the_start_while_the_engine_still_loads():
    with served("fake:hang", tokenizer_path="/nonexistent/model") as server:
        _, err = server.process.communicate(timeout=PATIENCE_S)
        assert server.process.returncode == 2, err
        assert "/nonexistent/model" in err.splitlines()[-1]
        wait_gone(server.engine_pid)


def test_a_missing_chat_template_file_is_a_startup_error():
    with served(chat_template="/nonexistent/template.jinja") as server:
        _, err = server.process.communicate(timeout=PATIENCE_S)
        assert server.process.returncode == 2, err
        assert "template.jinja" in err.splitlines()[-1]


def test_a_unix_socket_serves_and_is_removed(tmp_path):
    path = tmp_path / "api.sock"
    with served(uds=str(path)) as server:
        server.ready()
        assert server.url == f"unix:{path}"
        assert server.get("/health")[0] == 200
        server.stop()
        server.ends_with(0)
    assert not path.exists()


def test_a_server_that_drains_leaves_the_unix_socket_of_its_successor(tmp_path):
    path = str(tmp_path / "api.sock")
    with served("fake:slow", uds=path) as old:
        old.ready()
        response = old.post(stream=True, max_tokens=900)
        response.readline()
        old.stop()
        wait_until(lambda: not Path(path).exists())
        with served(uds=path) as new:
            new.ready()
            old.stop()
            assert events(response.read().decode())[-1]["error"]["code"] == "service_unavailable"
            old.ends_with(143)
            assert new.get("/health")[0] == 200
            new.stop()
            new.ends_with(0)
    assert not Path(path).exists()


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
        aborted = 'finished_reason="abort",model_name="fake"} 1.0'
        wait_until(lambda: aborted in server.get("/metrics")[1].decode())
        text = server.get("/metrics")[1].decode()
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
        server.ends_with(0)


def test_a_taken_port_is_told_in_one_line():
    with open_listener(ServerOptions(port=0)) as listener:
        port = listener.getsockname()[1]
        assert url_of(listener) == f"http://127.0.0.1:{port}"
        with (
            pytest.raises(ConfigError, match=f"port {port}: Address already in use.*--port"),
            open_listener(ServerOptions(port=port)),
        ):
            pass


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid", "a" * 300])
def test_an_address_of_another_machine_is_told_in_one_line(host):
    with (
        pytest.raises(ConfigError, match="cannot listen on"),
        open_listener(ServerOptions(host=host, port=0)),
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
        open_listener(ServerOptions(port=0)) as listener,
    ):
        before = psutil.Process().num_fds()
        for _ in range(2):
            with socket.create_connection(listener.getsockname()) as client:
                client.settimeout(PATIENCE_S)
                select.select([listener], [], [], PATIENCE_S)
                with pytest.raises(BlockingIOError):
                    listener.accept()
                assert client.recv(1) == b""
        assert psutil.Process().num_fds() == before
        with socket.create_connection(listener.getsockname()):
            select.select([listener], [], [], PATIENCE_S)
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
    with open_listener(ServerOptions(uds=str(path))):
        with (
            pytest.raises(ConfigError, match="Address already in use"),
            open_listener(ServerOptions(uds=str(path))),
        ):
            pass
        assert path.exists()
    assert not path.exists()


def test_a_file_in_the_place_of_a_socket_stays(tmp_path):
    path = tmp_path / "precious"
    path.write_text("data")
    with (
        pytest.raises(ConfigError, match="cannot listen on the socket"),
        open_listener(ServerOptions(uds=str(path))),
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
        ({"host": "0.0.0.0", "api_key": ("k",)}, False),
        ({"host": "0.0.0.0", "uds": "/run/x"}, False),
    ],
    ids=str,
)
def test_an_open_address_without_a_key_is_warned_about(caplog, options, warns):
    with caplog.at_level(logging.WARNING, logger="cpuserve"):
        serve._warn_if_open(ServerOptions(**options))
    assert bool(caplog.records) == warns
