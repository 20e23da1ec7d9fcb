"""Internal failures: each 500 has OpenAI's format, the request's id, and one line in the log."""

import logging

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from cpuserve.api.http import guards
from cpuserve.base import errors
from cpuserve.base.errors import InvalidRequest, RequestError, TooManyRequests
from cpuserve.engine.ipc import Output
from cpuserve.tokenizer.tokenizer import Tokenizer as OurTokenizer
from tests.api.fakes import Api, error_of, events_of, tokenizer

PATHS = ["/v1/chat/completions", "/v1/completions"]
# With this pattern the time to find that there is no match doubles with every letter of the text,
# and the tokenizers library panics at its limit.
BACKTRACKS = Regex("(a+)+$")
CRUEL = "a" * 40 + "c"


class Panic(BaseException):
    """Like the panic of a Rust library: a BaseException that is not an Exception."""


def body(text="hi", **fields):
    return {"messages": [{"role": "user", "content": text}], "prompt": text, **fields}


def ask(api, path, **fields):
    return api.request("POST", path, json=body(**fields), headers={"x-request-id": "r-17"})


def failures(caplog):
    """Return the log's errors, after checking that each contains the request's id."""
    lines = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert all("r-17" in record.getMessage() for record in lines)
    return lines


@pytest.fixture
def backtracking(tmp_path):
    """An Api whose model has a tokenizer.json with the pattern BACKTRACKS."""
    core = Tokenizer(models.BPE(vocab={"a": 0, "c": 1, "x" * 200: 2}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.Split(BACKTRACKS, "isolated")
    core.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}")
    api = Api()
    api.context.tokenizer = OurTokenizer.load(tmp_path)
    return api


@pytest.mark.matrix
@pytest.mark.parametrize("path", [*PATHS, "/tokenize"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", [CRUEL, "b" * 10_000 + CRUEL], ids=["short", "in a thread"])
def test_a_panic_in_the_tokenizers_library_is_a_400(backtracking, caplog, path, stream, text):
    fields = body(text, stream=stream) if path in PATHS else {"prompt": text}
    response = backtracking.request("POST", path, json=fields, headers={"x-request-id": "r-17"})
    assert response.status_code == 400
    assert response.headers["x-request-id"] == "r-17"
    error = error_of(response)
    assert error["type"] == "BadRequestError"
    assert "tokenizer" in error["message"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", [Panic, ZeroDivisionError])
def test_an_unexpected_exception_is_a_500_without_its_text(caplog, path, n, stream, kind):
    def fail(engine, number, prompt, params):
        raise kind("secret")

    response = ask(Api(fail), path, n=n, stream=stream)
    assert response.status_code == 500
    assert response.headers["x-request-id"] == "r-17"
    assert "secret" not in error_of(response)["message"]
    (line,) = failures(caplog)
    assert line.exc_info[0] is kind


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("kind", [Panic, ZeroDivisionError, RequestError])
def test_the_same_in_mid_stream_is_an_event(caplog, path, n, kind):
    def fail(engine, number, prompt, params):
        yield Output(number, [tokenizer().encode("h")[0]])
        raise kind("what happened")

    api = Api(fail)
    events = events_of(ask(api, path, n=n, stream=True))
    assert events[-1]["error"]["code"] == "server_error"
    assert ("what happened" in events[-1]["error"]["message"]) == (kind is RequestError)
    assert len(failures(caplog)) == 1
    assert api.engine.running == 0


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_the_engine_refused_is_logged(caplog, path, stream):
    def nan(engine, number, prompt, params):
        yield Output(number, [], "error", error="the model produced NaN logits")

    response = ask(Api(nan), path, stream=stream)
    assert response.status_code == 500
    assert error_of(response)["message"] == "the model produced NaN logits"
    (line,) = failures(caplog)
    assert "the model produced NaN logits" in line.getMessage()
    assert line.exc_info is None


@pytest.mark.parametrize("error", [InvalidRequest("no"), TooManyRequests("full")])
def test_errors_that_are_not_internal_failures_are_not_logged(caplog, error):
    assert ask(Api(lambda *_: [error]), PATHS[0]).status_code == error.status
    assert failures(caplog) == []


def test_a_failure_while_a_key_is_checked_is_a_500_too(caplog, monkeypatch):
    def fail(self, scope):
        msg = "secret"
        raise ZeroDivisionError(msg)

    monkeypatch.setattr(guards.ApiKeys, "_identify", fail)
    response = ask(Api(api_keys=("key",)), PATHS[0])
    assert response.status_code == 500
    assert "secret" not in error_of(response)["message"]
    assert len(failures(caplog)) == 1


def test_every_class_of_errors_has_the_kind_of_its_status():
    """Otherwise a client that compares `type` would see two names for one status."""
    left, seen = [errors.RequestError], {}
    while left:
        each = left.pop()
        left += each.__subclasses__()
        seen[each.status] = seen.get(each.status, set()) | {each.kind}
    assert seen == {status: {kind} for status, (kind, _) in errors.KINDS.items()}
