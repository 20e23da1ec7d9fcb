"""What signals do: a server that stops lets streams finish and refuses new requests."""

import http.client
import json
import os
import signal
import socket
from pathlib import Path

import pytest

from cpuserve.api.lifecycle.signals import stop_signals
from tests.api.server_process import LONG_S, events, listening, served
from tests.helpers.depth import deep_but
from tests.helpers.patience import PATIENCE_S, wait_until

ENDS = [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT]


@pytest.mark.parametrize("number", deep_but(ENDS[:1], ENDS), ids=lambda s: s.name)
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


@pytest.mark.deep
def test_a_stream_that_takes_too_long_is_ended_with_an_error():
    with served("fake:slow", drain_s=0.3) as server:
        server.ready()
        response = server.post(stream=True, max_tokens=900)
        first = response.readline()
        server.stop()
        text = (first + response.read()).decode()
        assert events(text)[-1]["error"]["code"] == "service_unavailable"
        server.ends_with(0)


@pytest.mark.deep
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


@pytest.mark.deep
@pytest.mark.parametrize("drain_delay_s", deep_but([0], [0, LONG_S]))
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


@pytest.mark.deep
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


@pytest.mark.deep
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
    ignored = {signal.SIGQUIT: signal.SIG_IGN, signal.SIGINT: signal.SIG_IGN}
    monkeypatch.setattr(signal, "getsignal", lambda n: ignored.get(n, signal.SIG_DFL))
    assert set(stop_signals()) == {signal.SIGINT, signal.SIGTERM}


def test_a_hangup_ends_the_server_in_no_phase():
    with served("fake:slow") as server:
        server.stop(signal.SIGHUP)  # while the engine loads
        server.ready()
        response = server.post(stream=True, max_tokens=40)
        first = response.readline()
        for pid in (server.engine_pid, server.process.pid):  # a terminal signals both
            os.kill(pid, signal.SIGHUP)
        assert server.get("/health")[0] == 200
        server.stop()
        wait_until(lambda: not listening(server.process.pid))
        server.stop(signal.SIGHUP)  # a second signal that stops would end the stream
        text = (first + response.read()).decode()
        assert events(text)[-1]["choices"][0]["finish_reason"] == "length"
        server.ends_with(0)


@pytest.mark.deep
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
