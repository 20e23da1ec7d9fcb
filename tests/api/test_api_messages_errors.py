"""Errors of Anthropic's messages: bad requests and others, in that dialect."""

import pytest

from cpuserve.base.errors import EngineDead
from cpuserve.engine.ipc import Output
from cpuserve.serving.models.limits import ClientLimits
from tests.api.anthropic_messages import (
    DOCUMENT,
    FORM,
    FOUND,
    HI,
    PLAIN,
    SEARCH,
    ask,
    error_of,
    events_of,
)
from tests.api.fakes import Api, speak

IMAGE = {"role": "user", "content": [{"type": "image"}]}


def sent(block):
    """The fields of a request with this block."""
    return {"messages": [{"role": "user", "content": [block]}]}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages.0.content.0"),
        ({"messages": [IMAGE]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"messages": [*HI, {"role": "assistant", "content": [{"type": "tool_use"}]}]}, "an id"),
        (sent({**DOCUMENT, "source": {"type": "base64", "media_type": "application/pdf"}}),
         "messages.0.content.0 has type 'document'; this model reads text only: send its text as"),
        (sent({**DOCUMENT, "source": {"type": "url", "url": "http://x"}}), "content.0 has type"),
        (sent({**DOCUMENT, "source": {**PLAIN, "media_type": "text/html"}}), "must be text/plain"),
        (sent({**DOCUMENT, "source": {**PLAIN, "data": 1}}), "content.0.source must have its data"),
        (sent({**DOCUMENT, "source": "a"}), "messages.0.content.0 has type"),
        (sent({**DOCUMENT, "title": 1}), "must have its title as a string"),
        (sent({"type": "document"}), "messages.0.content.0 has type"),
        (sent({**FOUND, "title": None}), "must have its title as a string"),
        (sent({**FOUND, "content": [{"type": "image"}]}), "0.content.0.content.0 has type"),
        (sent({**FOUND, "content": None}), "messages.0.content.0.content"),
        ({"system": [DOCUMENT]}, "system.0"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0: prompts cannot be cached"),
        ({"max_tokens": -1}, "max_tokens must be at least 1, got -1"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"system": [{"type": "image"}]}, "system.0"),
        ({"thinking": {"type": "always"}}, "thinking.type must be enabled, disabled, adaptive or"),
        ({"tools": [{"type": "costum", "name": "bash"}]}, "tools.0.type must be custom"),
        ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "this server cannot run web_search"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name must have"),
        ({"tools": [{"name": "a", "input_schema": [1]}]}, "tools.0.input_schema must be"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": []}}, "tool_choice must be"),
        ({"tool_choice": {"type": "auto", "name": 1}}, "tool_choice must be"),
        ({"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]}, "mcp_servers"),
        ({"container": "c1"}, "container"),
        ({"output_config": "json"}, "output_config"),
        ({"output_config": {"effort": "extreme"}}, "output_config.effort"),
        ({"output_config": {"effort": 1}}, "output_config.effort"),
        ({"output_config": {"format": "json"}}, "output_config.format"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"output_config": {"format": {"type": "regex"}}}, "output_config.format has type 'regex'"),
        ({"output_config": {"format": {"schema": {}}}}, "output_config.format"),
        ({"output_format": {**FORM, "strct": 1}}, "output_format has the unknown field 'strct'"),
        ({"output_config": {"format": {**FORM, "shema": {}}}},
         "output_config.format has the unknown field 'shema'"),
        ({"output_format": {"type": "json_object"}}, "output_format has type 'json_object'"),
        ({"output_format": FORM, "output_config": {"format": FORM}}, "output_config.format"),
    ],
    ids=str,
)  # fmt: skip
def test_a_bad_request_is_refused_in_this_dialect(fields, named):
    api = Api()
    response = ask(api, **fields)
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    assert named in error["message"]
    assert ask(api).status_code == 200


@pytest.mark.parametrize(
    ("status", "kind", "change"),
    [
        (401, "authentication_error", {"key": None}),
        (401, "authentication_error", {"key": "other"}),
        (404, "not_found_error", {"path": "/v1/messages/other"}),
        (404, "not_found_error", {"model": "other"}),
        (405, "invalid_request_error", {"method": "GET"}),
        (413, "request_too_large", {"content": "x" * 6000}),
        (429, "rate_limit_error", {"queued": 2}),
        (503, "overloaded_error", {"ready": False}),
        (500, "api_error", {"script": ZeroDivisionError("secret")}),
    ],
    ids=lambda value: value if isinstance(value, int) else "",
)
def test_other_errors_have_this_dialects_format_too(status, kind, change):
    def raising(engine, number, prompt, params):
        yield change["script"]

    limits = ClientLimits(max_body_bytes=4096, max_queued_requests=2)
    api = Api(raising if "script" in change else speak, http=limits, api_keys=("k",))
    api.context.ready = change.get("ready", True)
    for _ in range(change.get("queued", 0)):
        api.context.backlog.enter(1)
    key = change.get("key", "k")
    headers = {"x-api-key": key} if key else {}
    messages = [{"role": "user", "content": change.get("content", "hi")}]
    body = {"messages": messages, "max_tokens": 5, "model": change.get("model", "tiny")}
    path, method = change.get("path", "/v1/messages"), change.get("method", "POST")
    response = api.request(method, path, json=body, headers=headers)
    assert response.status_code == status, response.text
    error = error_of(response)
    assert error["type"] == kind
    assert "secret" not in error["message"]


def test_the_other_routes_keep_openais_errors():
    for path in ("/v1/chat/completions", "/v1/messagesx"):
        response = Api().post(path)
        assert set(response.json()) == {"error"}
        assert "request-id" not in response.headers


def test_a_failure_in_the_middle_ends_the_stream_with_an_error():
    def fails(engine, number, prompt, params):
        yield Output(number, [40])
        yield EngineDead("the engine was killed by SIGKILL")

    response = ask(Api(fails), stream=True)
    events = events_of(response)
    told = {"type": "overloaded_error", "message": "the engine was killed by SIGKILL"}
    number = response.headers["request-id"]
    assert events[-1] == ("error", {"type": "error", "error": told, "request_id": number})
    assert "message_stop" not in [name for name, _ in events]
