"""Crashes of the engine: streams end with an error, and the engine is started again."""

import json
import os
import signal

import pytest

from tests.api.server_process import events, served
from tests.helpers.patience import PATIENCE_S, wait_gone, wait_until


def ends_with_the_engines_death(response):
    """Read a stream while its engine is killed, and check the error event at its end."""
    error = events(response.read().decode())[-1]["error"]
    kind = error["type"], error["code"]
    assert kind == ("ServiceUnavailableError", "service_unavailable"), "as outside a stream"
    assert "SIGKILL" in error["message"]


@pytest.mark.deep
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


@pytest.mark.deep
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


@pytest.mark.deep
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


@pytest.mark.deep
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


@pytest.mark.deep
@pytest.mark.parametrize("replicas", [1, 2])
def test_an_engine_that_dies_again_and_again_while_it_starts_first_ends_the_server(replicas):
    with served("fake:dies", replicas=replicas) as server:
        _, err = server.process.communicate(timeout=PATIENCE_S)
        assert server.process.returncode == 2, err
        assert err.splitlines()[-1].startswith("cpuserve: error: the engine did not start: ")
        assert "exit code 9" in err.splitlines()[-1]
        assert "starting attempt 3 of 3" in err


@pytest.mark.deep
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


@pytest.mark.deep
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


@pytest.mark.deep
def test_when_the_front_end_is_killed_the_engine_ends():
    with served("fake:slow") as server:
        server.ready()
        server.process.kill()
        wait_gone(server.engine_pid)
