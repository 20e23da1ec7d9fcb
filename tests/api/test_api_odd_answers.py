"""Thoughts and calls that go wrong, in each dialect: its own shape and status, and never a 500.

A stream of another client runs during each request, and goes on.
"""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import pytest

from cpuserve.engine.ipc import Output
from tests.api.test_api_thoughts import HI, OPENED, OPENS, SCHEMA, THOUGHT
from tests.api.tools import CALL, TEMPLATE, WEATHER, says, tool_api

NEIGHBOUR = [11, 12, 13]
PNG = "iVBORw0KGgo="
FUNCTION = WEATHER["function"]


@dataclass(frozen=True)
class Dialect:
    """How a dialect is asked for a response, and what its responses look like.

    form: fields of a structured output. image: a message with an image. cut: why a response that
    was cut off ended.
    """

    path: str
    body: dict[str, Any]
    tools: list[Any]
    form: dict[str, Any]
    image: dict[str, Any]
    cut: str

    def message(self, error):
        """The message of an error, after checking its shape."""
        if self.path == "/api/chat":
            assert list(error) == ["error"]
            return error["error"]
        if self.path == "/v1/messages":
            assert error["type"] == "error"
            assert set(error["error"]) == {"type", "message"}
        else:
            assert set(error["error"]) == {"message", "type", "param", "code"}
        return error["error"]["message"]

    def end(self, body):
        """Why a whole response ended."""
        if self.path == "/v1/responses":
            return body["status"]
        if self.path == "/v1/messages":
            return body["stop_reason"]
        return body["done_reason"] if "done" in body else body["choices"][0]["finish_reason"]


def with_parts(part):
    return [{"role": "user", "content": [{"type": "text", "text": "See"}, part]}]


URL = f"data:image/png;base64,{PNG}"
SOURCE = {"type": "base64", "media_type": "image/png", "data": PNG}
JSON_SCHEMA = {"type": "json_schema", "name": "a", "schema": SCHEMA}
TOOL = {"name": "weather", "input_schema": FUNCTION["parameters"]}
DIALECTS = {
    "chat": Dialect(
        "/v1/chat/completions",
        {"messages": HI},
        [WEATHER],
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        {"messages": with_parts({"type": "image_url", "image_url": {"url": URL}})},
        "length",
    ),
    "responses": Dialect(
        "/v1/responses",
        {"input": "hi"},
        [{"type": "function", **FUNCTION}],
        {"text": {"format": JSON_SCHEMA}},
        {
            "input": [
                {"role": "user", "content": [{"type": "input_image", "image_url": URL}]},
            ]
        },
        "incomplete",
    ),
    "messages": Dialect(
        "/v1/messages",
        {"messages": HI, "max_tokens": 1000},
        [TOOL],
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {"messages": with_parts({"type": "image", "source": SOURCE})},
        "max_tokens",
    ),
    "ollama": Dialect(
        "/api/chat",
        {"messages": HI},
        [WEATHER],
        {"format": SCHEMA},
        {"messages": [{"role": "user", "content": "See", "images": [PNG]}]},
        "length",
    ),
}
every_dialect = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def ask(dialect, script, source=TEMPLATE, *, stream=False, **fields):
    """The response to a request, during which a stream of another client runs and goes on."""
    done = asyncio.Event()

    def with_neighbour(engine, number, prompt, params):
        if list(prompt) != NEIGHBOUR:
            yield from script(engine, number - 1, prompt, params)
            return
        yield Output(number, [65])
        yield done
        yield Output(number, [66], "length")

    api = tool_api(with_neighbour, source=source)

    async def both_requests():
        neighbour = {"prompt": NEIGHBOUR, "stream": True, "return_token_ids": True}
        running = asyncio.ensure_future(api._request("POST", "/v1/completions", json=neighbour))
        while not api.engine.asked:
            await asyncio.sleep(0)
        body = {"model": "tiny", **dialect.body, "stream": stream, **fields}
        response = await api._request("POST", dialect.path, json=body)
        done.set()
        return response, await running

    response, beside = asyncio.run(both_requests())
    assert '"token_ids":[65]' in beside.text
    assert '"token_ids":[66]' in beside.text
    assert beside.text.endswith("data: [DONE]\n\n")
    assert (api.engine.running, api.context.active_sequences) == (0, 0)
    return response


def events_of(response):
    """The JSON of each event of a stream."""
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def refused(engine, number, prompt, params):
    """The engine refuses the grammar, before the thought."""
    assert params.structured_outputs is not None
    error = "the JSON schema cannot be kept: it is too odd"
    yield Output(number, [], "error", error=error, fault="response_format")


@every_dialect
@both
@pytest.mark.parametrize("source", [TEMPLATE, OPENED], ids=["no thoughts", "thinks"])
def test_a_schema_that_cannot_be_kept_is_refused(dialect, stream, source):
    response = ask(dialect, refused, source, stream=stream, **dialect.form)
    assert response.status_code == 400
    assert "too odd" in dialect.message(response.json())


@every_dialect
@both
def test_a_thought_that_never_ends_is_cut_off(dialect, stream):
    response = ask(dialect, says(THOUGHT, finish="length"), OPENED, stream=stream)
    if not stream:
        assert dialect.end(response.json()) == dialect.cut
        assert THOUGHT.splitlines()[0] in response.text
        return
    ends = json.dumps(events_of(response))
    assert f'"{dialect.cut}"' in ends
    assert "error" not in {line.get("type") for line in events_of(response)}


@pytest.mark.matrix
@every_dialect
@pytest.mark.parametrize("source", [TEMPLATE, OPENS], ids=["no thoughts", "thinks"])
def test_a_call_may_be_cut_anywhere(dialect, source):
    text = CALL if source is TEMPLATE else f"<think>\nSo.\n</think>\n\n{CALL}"
    for end in range(len(text) - len(CALL) + 1, len(text), 5):
        for stream in (False, True):
            cut = says(text[:end], finish="length")
            response = ask(dialect, cut, source, stream=stream, tools=dialect.tools)
            assert response.status_code == 200, (end, response.text)
            if not stream:
                reason = dialect.end(response.json())
                assert reason in (dialect.cut, "tool_calls", "tool_use", "completed", "stop"), end
            elif dialect.path == "/v1/messages":
                kinds = [line["type"] for line in events_of(response)]
                assert kinds.count("content_block_start") == kinds.count("content_block_stop")
                assert kinds[-1] == "message_stop"


@every_dialect
@both
def test_an_image_for_a_model_of_texts_is_refused_or_replaced(dialect, stream):
    response = ask(dialect, says("I see."), stream=stream, **dialect.image)
    if response.status_code == 200:
        assert "I see." in response.text or stream
        return
    assert response.status_code == 400
    assert "image" in dialect.message(response.json())


FOREIGN = {
    "responses": {
        "input": [
            *HI,
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA=="},
            {"role": "assistant", "content": "Hello."},
            {"role": "user", "content": "And?"},
        ]
    },
    "messages": {
        "messages": [
            *HI,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "", "signature": "EqQBCgIYAh=="},
                    {"type": "redacted_thinking", "data": "EmwKAhgBEg=="},
                    {"type": "text", "text": "Hello."},
                ],
            },
            {"role": "user", "content": "And?"},
        ]
    },
    "chat": {
        "messages": [
            *HI,
            {
                "role": "assistant",
                "content": "Hello.",
                "reasoning_details": [{"type": "reasoning.encrypted", "data": "gAAAA=="}],
            },
            {"role": "user", "content": "And?"},
        ]
    },
    "ollama": {
        "messages": [
            *HI,
            {"role": "assistant", "content": "Hello.", "thinking": ""},
            {"role": "user", "content": "And?"},
        ]
    },
}


@pytest.mark.parametrize("name", FOREIGN)
@both
def test_thoughts_of_another_server_are_no_error(name, stream):
    response = ask(DIALECTS[name], says("Yes."), OPENS, stream=stream, **FOREIGN[name])
    assert response.status_code == 200, response.text


# A template that refuses the probes for calls, and one that fails at every turn of an assistant.
RAISING = {
    "tools": TEMPLATE.replace("{% if tools %}", "{% if tools %}{{ raise_exception('no') }}"),
    "turns": TEMPLATE.replace(
        "{% for message in messages %}",
        "{% for message in messages %}{% if message.role == 'assistant' %}"
        "{{ raise_exception('no turns') }}{% endif %}",
    ),
}


@every_dialect
@pytest.mark.parametrize("source", RAISING.values(), ids=RAISING)
def test_a_template_that_raises_in_a_probe_serves_what_it_can(dialect, source):
    assert ask(dialect, says("Yes."), source).status_code == 200
    response = ask(dialect, says("Yes."), source, tools=dialect.tools)
    if response.status_code != 200:
        assert response.status_code == 400
        assert "template" in dialect.message(response.json())
