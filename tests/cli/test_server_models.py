"""`cpuserve ps` and `cpuserve stop` against a server."""

import json

import pytest

from cpuserve.cli import server_models
from cpuserve.cli.main import main
from cpuserve.testing import scripted


@pytest.fixture(scope="module")
def server():
    with scripted(model="my-model", strict=False) as server:
        yield server


def test_ps_lists_the_models_in_memory(capsys, server):
    assert main(["ps", "--url", server.openai_url]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["MODEL", "SIZE", "CONTEXT", "UNTIL"]
    assert row.split()[0].partition(":")[0] == "my-model"
    assert "131072" in row
    assert row.endswith("always")
    assert main(["ps", "--url", server.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["context_length"] == 131072


def test_stop_sends_the_request_that_unloads(capsys, server):
    assert main(["stop", "my-model", "--url", server.url]) == 1  # its only model stays loaded
    assert "my-model is still loaded: a request uses it" in capsys.readouterr().err
    sent = server.exchanges[-2]
    assert (sent.path, sent.body) == ("/api/generate", {"model": "my-model", "keep_alive": 0})


def test_stop_says_that_a_model_is_unloaded(capsys, monkeypatch):
    """The server is a stub with the responses of a server that has unloaded the model."""
    responses = {
        "/api/generate": {"model": "m", "done": True, "done_reason": "unload"},
        "/api/ps": {"models": [{"name": "other"}]},
    }
    monkeypatch.setattr(server_models, "_object", lambda _, path, body=None: responses[path])
    assert main(["stop", "m"]) == 0
    assert "m is unloaded; the next request loads it again" in capsys.readouterr().err
    responses["/api/generate"]["done_reason"] = "load"
    assert main(["stop", "m"]) == 1


@pytest.mark.parametrize("words", [["ps"], ["stop", "m"]])
def test_a_server_that_is_not_there_is_one_line(capsys, words):
    assert main([*words, "--url", "http://127.0.0.1:9"]) == 1
    error = capsys.readouterr().err
    assert "no answer from http://127.0.0.1:9" in error
    assert error.count("\n") == 1


def test_a_server_that_refuses_is_one_line(capsys):
    with scripted(api_key="secret") as server:
        assert main(["ps", "--url", server.url]) == 1
        assert "HTTP 401" in capsys.readouterr().err
        assert main(["ps", "--url", server.url, "--api-key", "secret"]) == 0
