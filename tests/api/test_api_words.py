"""Errors of checks that all dialects share name the field that the client sent."""

from __future__ import annotations

from typing import Any

import pytest

from cpuserve.base.errors import InvalidRequest
from cpuserve.engine.ipc import Output
from tests.api.fakes import MAX_LEN, Api, FakeEngine

LONG = "a" * (4 * MAX_LEN)
HI = [{"role": "user", "content": "hi"}]
STOPS = [str(i) for i in range(65)]
BIG = {"type": "object", "description": "x" * (1 << 18)}  # more than a schema may have
SCHEMA = {"type": "object"}


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": HI, **fields}


def complete(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": "hi", **fields}


def respond(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"input": "hi", **fields}


def message(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/messages", {"messages": HI, "max_tokens": 9, **fields}


def ollama(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/api/chat", {"model": "tiny", "messages": HI, **fields}


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def flat_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "name": "a", "schema": schema}


# (path and body, the field, whether the message begins with it)
CASES = [
    (chat(max_tokens=0), "max_tokens", True),
    (chat(max_completion_tokens=0), "max_completion_tokens", True),
    (chat(max_tokens=5, max_completion_tokens=0), "max_completion_tokens", True),
    (chat(n_predict=0), "n_predict", True),
    (chat(messages=[{"role": "user", "content": LONG}]), "messages", False),
    (chat(response_format=json_schema(BIG)), "response_format", True),
    (chat(structured_outputs={"json": BIG}), "structured_outputs", True),
    (chat(stop=STOPS), "stop", True),
    (chat(temperature=-1), "temperature", True),
    (complete(max_tokens=0), "max_tokens", True),
    (complete(n_predict=0), "n_predict", True),
    (complete(prompt=LONG), "prompt", False),
    (complete(prompt=[]), "prompt", True),
    (complete(response_format=json_schema(BIG)), "response_format", True),
    (respond(max_output_tokens=0), "max_output_tokens", True),
    (respond(input=LONG), "input", False),
    (respond(reasoning={"effort": "much"}), "reasoning.effort", True),
    (respond(text={"format": flat_schema(BIG)}), "text.format", True),
    (respond(structured_outputs={"json": BIG}), "structured_outputs", True),
    (message(stop_sequences=STOPS), "stop_sequences", True),
    (message(output_config={"format": flat_schema(BIG)}), "output_config.format", True),
    (message(output_format=flat_schema(BIG)), "output_format", True),
    (message(temperature=-1), "temperature", True),
    (ollama(options={"temperature": -1}), "options.temperature", True),
    (ollama(options={"stop": STOPS}), "options.stop", True),
    (ollama(options={"repeat_penalty": 0}), "options.repeat_penalty", True),
    (ollama(format=BIG), "format", True),
    (("/v1/embeddings", {"input": []}), "input", True),
    (("/tokenize", {"messages": [{"role": "user", "content": "a" * (1 << 20)}]}), "messages",
     False),
    (("/api/embed", {"model": "tiny", "input": ["a"] * 1025}), "input", True),
]  # fmt: skip


@pytest.fixture(scope="module")
def api() -> Api:
    return Api()


def check(body: dict[str, Any], field: str, begins: bool) -> None:
    error = body["error"]
    text = error if isinstance(error, str) else error["message"]
    assert text.startswith(f"{field} ") or not begins, text
    if isinstance(error, dict) and "param" in error:
        assert error["param"] == field


@pytest.mark.parametrize(("asked", "field", "begins"), CASES, ids=lambda v: str(v)[:60])
def test_an_error_has_the_field_of_the_dialect(api, asked, field, begins):
    path, body = asked
    api.context.pooling = "last" if "embed" in path else "none"
    response = api.post(path, **body)
    assert response.status_code == 400, response.text
    check(response.json(), field, begins)


FORMS = {
    "response_format": chat(response_format=json_schema(SCHEMA)),
    "structured_outputs": chat(structured_outputs={"json": SCHEMA}),
    "text.format": respond(text={"format": flat_schema(SCHEMA)}),
    "output_config.format": message(output_config={"format": flat_schema(SCHEMA)}),
    "format": ollama(format=SCHEMA),
}


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("field", FORMS)
def test_an_error_of_the_engine_has_the_field_of_the_dialect(field, stream, started):
    """The engine compiles grammars, and says which part of the request was the cause."""

    def script(engine: FakeEngine, number: int, prompt: list[int], params: Any) -> Any:
        if started:
            yield Output(number, [72])
        why = f"{params.structured_outputs.role} cannot be compiled to a grammar: a loop"
        yield Output(number, [], "error", error=why, fault=params.structured_outputs.role)

    path, body = FORMS[field]
    response = Api(script).post(path, **{**body, "stream": stream})
    assert response.status_code == (200 if started and stream else 400), response.text
    assert f"{field} cannot be compiled to a grammar: a loop" in response.text
    before = response.text.partition(" cannot be compiled")[0]
    assert before.endswith(f'"{field}')


def test_the_words_replace_a_role_once_and_only_at_the_start():
    error = InvalidRequest("stop has 65 strings: stop sooner", role="stop")
    error.use_words({"stop": "options.stop"})
    error.use_words({"stop": "options.stop"})
    assert (error.message, error.param) == ("options.stop has 65 strings: stop sooner",
                                            "options.stop")  # fmt: skip
    other = InvalidRequest("stop_token_ids has too many", role="stop")
    other.use_words({"stop": "x"})
    assert (other.message, other.param) == ("stop_token_ids has too many", "x")
    own = InvalidRequest("stop it", param="stop")
    own.use_words({"stop": "x"})
    assert (own.message, own.param) == ("stop it", "stop")
