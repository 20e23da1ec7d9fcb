"""The start of the server, its addresses and its metrics: real processes with a fake model."""

import asyncio
import errno
import gc
import json
import logging
import os
import resource
import select
import signal
import socket
from pathlib import Path

import psutil
import pytest

from cpuserve.api.http import startup_server
from cpuserve.api.http.listener import MOST_FILES, open_listener, raise_file_limit, url_of
from cpuserve.api.lifecycle import serve
from cpuserve.base.errors import ConfigError
from cpuserve.config.server import ServerOptions
from cpuserve.serving.models.load_progress import LoadProgress
from tests.api.fakes import Api
from tests.api.server_process import listening, served
from tests.helpers.depth import deep_but
from tests.helpers.patience import PATIENCE_S, wait_gone, wait_until


def test_connections_send_small_packets_at_once():
    """Otherwise a token waits until the client has confirmed the one before it: 40 ms on Linux."""
    told = asyncio.Queue()

    async def note(reader, writer):
        connection = writer.get_extra_info("socket")
        await told.put(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    async def main():
        with open_listener(ServerOptions(port=0)) as listener:
            async with await asyncio.start_server(note, sock=listener):
                _, writer = await asyncio.open_connection(*listener.getsockname())
                assert await told.get() == 1
                writer.close()

    asyncio.run(main())


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


@pytest.mark.parametrize(
    "number", deep_but([signal.SIGTERM], [signal.SIGTERM, signal.SIGINT]), ids=lambda s: s.name
)
def test_a_signal_ends_a_download_at_once(number):
    with served(download="until a line comes") as server:
        wait_until(lambda: b"40" in server.get("/health")[1])
        server.stop(number)
        _, err = server.process.communicate(timeout=PATIENCE_S)
        assert server.process.returncode == 0, err
        assert err == ""


@pytest.mark.deep
@pytest.mark.parametrize("number", deep_but([signal.SIGTERM], [signal.SIGTERM, signal.SIGINT]))
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


ENDS = {"fake:startup": "the model is not there", "fake:broken": "ZeroDivisionError: a bug"}


@pytest.mark.deep
@pytest.mark.parametrize("model", deep_but(["fake:broken"], ENDS))
def test_an_engine_that_cannot_start_is_a_startup_error(model):
    with served(model) as server:
        _, err = server.process.communicate(timeout=PATIENCE_S)
        assert server.process.returncode == 2
        assert ENDS[model] in err.splitlines()[-1]
        assert err.splitlines()[-1].startswith("cpuserve: error: ")
        wait_gone(server.engine_pid)


@pytest.mark.deep
def test_a_missing_tokenizer_is_a_startup_error():
    with served(tokenizer_path="/nonexistent/model") as server:
        _, err = server.process.communicate(timeout=PATIENCE_S)
        assert server.process.returncode == 2, err
        assert "/nonexistent/model" in err.splitlines()[-1]
        assert "Traceback" not in err
        wait_gone(server.engine_pid)


@pytest.mark.deep
def test_a_missing_tokenizer_ends_the_start_while_the_engine_still_loads():
    with served("fake:hang", tokenizer_path="/nonexistent/model") as server:
        _, err = server.process.communicate(timeout=PATIENCE_S)
        assert server.process.returncode == 2, err
        assert "/nonexistent/model" in err.splitlines()[-1]
        wait_gone(server.engine_pid)


@pytest.mark.deep
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
        gc.collect()  # else files of earlier tests may be closed meanwhile
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


def test_a_unix_socket_may_be_below_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with open_listener(ServerOptions(uds="~/s")):
        assert (tmp_path / "s").exists()
    assert not (tmp_path / "s").exists()


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
