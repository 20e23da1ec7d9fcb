"""`cpuserve run`, and `chat` and `complete` with --url."""

import os
import subprocess
import sys

import pytest

from cpuserve.testing import failure, reply, scripted
from tests.cli.test_chat_terminal import PROMPT, READY, SMALL, terminal
from tests.helpers.children import child_options
from tests.helpers.patience import PATIENCE_S, wait_until
from tests.helpers.tiny import tiny_model


def command(*words, stdin="", **environment):
    """Run a command with `stdin`; return its exit code, stdout and stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "cpuserve", *words],
        **child_options(**environment),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def model():
    return str(tiny_model("llama"))


@pytest.fixture
def server():
    with scripted(strict=False) as server:
        yield server


def test_run_responds_to_a_pipe_and_to_words(model):
    options = [*SMALL, "--max-tokens", "4", "--temperature", "0"]
    code, piped, _ = command("run", model, *options, stdin="One two\n")
    assert code == 0
    assert piped.strip()
    code, said, _ = command("run", model, "One", "two", *options)
    assert (code, said) == (0, piped)
    code, chatted, _ = command("chat", model, "--message", "One two", *options)
    assert (code, chatted) == (0, piped)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["smolm2:135m"], "'smolm2:135m' is not a model; did you mean smollm2:135m?"),
        (["smollm2:135m"], "standard input is empty"),
    ],
)
def test_run_refuses_what_it_cannot_do_in_one_line(words, told):
    code, said, error = command("run", *words)
    assert (code, said) == (2, "")
    assert told in error
    assert error.count("\n") == 1


@pytest.mark.deep
def test_run_chats_on_a_terminal_and_ctrl_c_stops_a_response_only(model):
    with terminal("run", model, *SMALL, "--max-tokens", "2") as chat:
        chat.until(READY)
        chat.until_prompted()
        chat.type("hello\r")
        chat.until("tokens/s")
        chat.until(PROMPT)
        chat.type("/exit\r")
        assert chat.end() == 0
        assert "Traceback" not in chat.shown


def test_chat_at_a_server_keeps_the_conversation(server):
    server.add(reply("Hello.", thought="They greet."), "Bye.")
    code, said, error = command("chat", "--url", server.openai_url, stdin="Hi\nEnd\n")
    assert (code, said) == (0, "Hello.\nBye.\n")
    assert "They greet." in error
    assert "\x1b" not in said + error
    roles = [message["role"] for message in server.exchanges[-1].body["messages"]]
    assert roles == ["user", "assistant", "user"]


def test_complete_at_a_server_sends_the_sampling_fields(server):
    server.add("blue")
    words = ["--prompt", "The sky is", "--temperature", "0", "--max-tokens", "9"]
    assert command("complete", "--url", server.url, "m", *words)[:2] == (0, "blue\n")
    body = server.exchanges[-1].body
    assert (body["model"], body["prompt"], body["temperature"]) == ("m", "The sky is", 0)
    assert body["max_tokens"] == 9


@pytest.mark.deep
def test_ctrl_c_stops_the_response_of_a_server_and_not_the_chat(server):
    server.add(reply("word " * 400, pace_s=0.2), "second")
    with terminal("chat", "--url", server.url) as chat:
        chat.until_prompted()
        chat.type("first\r")
        chat.until("word word")
        chat.interrupt()
        wait_until(lambda: server.engine.aborted == 1, "the request was not aborted")
        chat.until(PROMPT)
        chat.type("again\r")
        chat.until("second")
        chat.until(PROMPT)
        chat.type("/exit\r")
        assert chat.end() == 0
        assert "Traceback" not in chat.shown


def test_errors_of_a_server_are_one_line(server):
    server.add(failure(429, "try again later"), failure(503, "stopped", after="The first half"))
    for told in ("(HTTP 429): try again later", "stopped"):
        code, _, error = command("chat", "--url", server.url, "--message", "Hi")
        assert code == 1
        assert told in error
        assert "Traceback" not in error


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--url", "http://127.0.0.1:9"], 1, "no answer from http://127.0.0.1:9"),
        (["--url", "127.0.0.1:8000"], 2, "write http://HOST:PORT"),
        (["--url", "http://x", "--max-model-len", "9"], 2, "--max-model-len is an option of the"),
    ],
)
def test_a_url_that_cannot_be_used_is_one_line(words, code, told):
    got, said, error = command("chat", *words, "--message", "Hi")
    assert (got, said) == (code, "")
    assert told in error
    assert error.count("\n") == 1


def test_a_key_comes_from_the_flag_or_the_environment():
    with scripted(default="yes", api_key="secret") as server:
        words = ["chat", "--url", server.url, "--message", "Hi"]
        assert command(*words, "--api-key", "secret")[:2] == (0, "yes\n")
        assert command(*words, CPUSERVE_API_KEY="secret")[:2] == (0, "yes\n")
        code, _, error = command(*words)
        assert code == 1
        assert "401" in error


def test_a_pipe_that_closes_early_leaves_no_traceback(server):
    server.add(reply("word " * 2000))
    ours, theirs = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-m", "cpuserve", "chat", "--url", server.url, "--message", "Hi"],
        **child_options(), stdin=subprocess.DEVNULL, stdout=theirs, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    os.close(theirs)
    os.close(ours)
    error = child.communicate(timeout=PATIENCE_S)[1]
    assert child.returncode == 141
    assert error == ""
