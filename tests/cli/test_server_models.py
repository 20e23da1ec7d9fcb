"""`cpuserve ps`, `cpuserve stop` and `cpuserve warm` against a server."""

import json
import os
import sys
import threading

import pytest

from cpuserve.cli import server_models
from cpuserve.cli.main import main
from cpuserve.testing import scripted
from tests.helpers.patience import PATIENCE_S, wait_until
from tests.helpers.served import running_server
from tests.helpers.tiny import tiny_model


@pytest.fixture(scope="module")
def server():
    with scripted(model="my-model", strict=False, default="ok") as server:
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


WARMED = [
    "a text",
    {"prompt": "a prompt", "max_tokens": 500, "stream": True},
    {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 9, "n": 3},
    {
        "custom_id": "1",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": "ho"}], "temperature": 0},
    },
]


def lines_in(path, lines):
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + "\n")
    return str(path)


def test_warm_sends_each_prompt_for_one_token(capsys, server, tmp_path):
    before = len(server.exchanges)
    assert main(["warm", lines_in(tmp_path / "p.jsonl", WARMED), "--url", server.url]) == 0
    sent = [(each.path, each.body) for each in server.exchanges[before:]]
    chat, text = "/v1/chat/completions", "/v1/completions"
    assert sent == [
        (text, {"prompt": "a text", "max_tokens": 1}),
        (text, {"prompt": "a prompt", "max_tokens": 1}),
        (chat, {"messages": WARMED[2]["messages"], "max_completion_tokens": 1}),
        (chat, {**WARMED[3]["body"], "max_completion_tokens": 1}),
    ]
    assert "the server has 4 prompts with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "is no JSON"),
        ("3", "must be a text"),
        ("[]", "must be a text"),
        ("{}", "must be a text"),
        ('{"prompt": "a", "messages": []}', "must be a text"),
        ("[" * 100_000, "is no JSON"),
        ('{"url": "/v1/messages", "body": {"messages": []}}', "is for another url than /v1/chat"),
        ('{"url": "/v1/responses", "body": {"prompt": "a"}}', "is for another url than /v1/comp"),
        ('{"url": {}, "body": {"prompt": "a"}}', "is for another url"),
    ],
    ids=range(9),
)
def test_warm_sends_nothing_if_a_line_is_invalid(capsys, server, tmp_path, line, said):
    path, before = tmp_path / "p.jsonl", len(server.exchanges)
    path.write_text(f'"good"\n{line}\n')
    assert main(["warm", str(path), "--url", server.url]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "line 2" in error
    assert len(server.exchanges) == before


def test_warm_sends_no_field_of_the_response_alone(capsys, server, tmp_path):
    fields = {"min_tokens": 5, "echo": True, "logprobs": 2, "prompt_logprobs": 1, "best_of": 2}
    before = len(server.exchanges)
    path = lines_in(tmp_path / "p.jsonl", [{"prompt": "a", "temperature": 0.5, **fields}])
    assert main(["warm", path, "--url", server.url]) == 0
    (sent,) = server.exchanges[before:]
    assert sent.body == {"prompt": "a", "temperature": 0.5, "max_tokens": 1}
    assert "the server has 1 prompts" in capsys.readouterr().err


def test_warm_reads_a_file_with_a_byte_order_mark(capsys, server, tmp_path):
    path, before = tmp_path / "p.jsonl", len(server.exchanges)
    path.write_bytes(b'\xef\xbb\xbf"one"\r\n"two"\r\n')
    assert main(["warm", str(path), "--url", server.url]) == 0
    assert [each.body["prompt"] for each in server.exchanges[before:]] == ["one", "two"]
    assert "the server has 2 prompts" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such pipes")
def test_warm_says_that_it_waits_for_the_writer_of_a_pipe(capsys, server, tmp_path):
    path, before = tmp_path / "prompts", len(server.exchanges)
    os.mkfifo(path)
    command = ["warm", str(path), "--url", server.url]
    codes = []
    thread = threading.Thread(target=lambda: codes.append(main(command)), daemon=True)
    thread.start()
    wait_until(lambda: "is a pipe: cpuserve waits" in capsys.readouterr().err)
    assert thread.is_alive()
    path.write_text('"one"\n')
    thread.join(PATIENCE_S)
    assert codes == [0]
    assert [each.body["prompt"] for each in server.exchanges[before:]] == ["one"]


def test_warm_refuses_a_file_without_an_end(capsys, server, monkeypatch):
    monkeypatch.setattr(server_models, "_MOST_BYTES", 1 << 20)
    assert main(["warm", "/dev/zero", "--url", server.url]) == 2
    assert (
        capsys.readouterr().err == "cpuserve: error: /dev/zero has more than 1.00 MiB: split it\n"
    )


def test_warm_names_the_line_that_the_server_refuses(capsys, server, tmp_path):
    lines = ["good", {"messages": [{"role": "user", "content": "x"}], "temperature": -1}]
    assert main(["warm", lines_in(tmp_path / "p.jsonl", lines), "--url", server.url]) == 1
    error = capsys.readouterr().err
    assert "line 2" in error
    assert "temperature" in error
    assert main(["warm", str(tmp_path / "none.jsonl"), "--url", server.url]) == 2
    assert "No such file" in capsys.readouterr().err


@pytest.mark.deep
def test_a_request_finds_the_prompt_that_was_warmed(capsys, tmp_path):
    messages = [{"role": "system", "content": "Be brief and exact. " * 40}]
    messages.append({"role": "user", "content": "hi"})
    path = lines_in(tmp_path / "p.jsonl", [{"messages": messages}])
    with running_server(tiny_model("llama", max_position_embeddings=4096)) as server:
        for computed in (True, False):
            assert main(["warm", path, "--url", server.url]) == 0
            words = capsys.readouterr().err.split()
            prompt, now = int(words[words.index("with") + 1]), int(words[words.index("cache;") + 1])
            assert prompt > 300
            assert now == prompt if computed else now <= 32
        body = {"messages": [messages[0], {"role": "user", "content": "ho"}], "max_tokens": 1}
        usage = server.post("/v1/chat/completions", **body)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= prompt - 64
