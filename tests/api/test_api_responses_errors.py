"""Errors of OpenAI's responses: bad requests and failures, whole and in a stream."""

import json

import pytest
from openai.types.responses import Response

from cpuserve.base.errors import EngineDead, TooManyRequests
from cpuserve.engine.ipc import Output
from cpuserve.serving.models.limits import ClientLimits
from tests.api.fakes import ANSWER, Api, error_of
from tests.api.openai_responses import (
    FORM,
    HI,
    LOGPROBS,
    NESTED,
    OTHER,
    PATH,
    SEARCH,
    WEATHER,
    ask,
    events_of,
)
from tests.api.tools import says, tool_api


def item(**fields):
    return {"input": [HI, fields]}


CALLED = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
TURN = {"input": [HI, CALLED, {**HI, "role": "assistant"}]}
IMAGE = {"type": "input_image", "image_url": "data:"}


@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        ({"input": None}, "input", "input is missing"),
        ({"input": []}, "input", "empty"),
        ({"input": ["hi"]}, "input", "input[0]"),
        (item(role="tool", content="x"), "input", "input[1].role"),
        (item(role="user", content=1), "input", "input[1].content"),
        (item(role="user", content=["a"]), "input", "input[1].content[0]"),
        (item(role="user", content=[IMAGE]), "input", "input[1].content[0] has type 'input_image'"),
        (item(role="user", content=[{"type": "input_text"}]), "input", "text as a string"),
        (item(type="web_search", id="ws_1"), "input", "input[1] has type 'web_search'"),
        (item(content="x"), "input", "input[1] has type"),
        (item(**{**CALLED, "name": None}), "input", "input[1] must have a call_id"),
        (item(**CALLED), "input", "input[1] is the function_call 'c1'"),
        (TURN, "input", "needs a function_call_output"),
        (item(type="function_call_output", call_id="c1", output="x"), "input", "no earlier"),
        (item(type="function_call_output", output="x"), "input", "call_id"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "16 pairs"),
        ({"metadata": {"k" * 65: "v"}}, "metadata", "keys of 64"),
        ({"metadata": {"k": "v" * 513}}, "metadata", "values of 512"),
        ({"continue_final_message": True}, "continue_final_message", "not supported"),
        ({"json_schema": {"type": "object"}}, "json_schema", "structured_outputs"),
        ({"input": "x " * 400}, "input", "maximum context length"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be at least 1"),
        ({"max_output_tokens": "9"}, "max_output_tokens", "an integer"),
        ({"max_tokens": 9}, "max_tokens", "use max_output_tokens"),
        ({"n_predict": 9}, "n_predict", "use max_output_tokens"),
        ({"response_format": FORM}, "response_format", "use text.format"),
        ({"messages": [HI]}, "messages", "use input"),
        ({"temperature": -1}, "temperature", "temperature"),
        ({"n": 2}, "n", "Send several requests"),
        ({"conversation": {"name": "a"}}, "conversation", "the id of a conversation"),
        ({"background": True, "store": False}, "background", "background needs store"),
        ({"previous_response_id": "r", "conversation": "c"}, "previous_response_id", "exclude"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "no stored prompts"),
        ({"context_management": [{"type": "compaction"}]}, "context_management", "omit it"),
        ({"moderation": {"model": "m"}}, "moderation", "omit it"),
        ({"prompt_logprobs": 0}, "prompt_logprobs", "omit it"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_json", "exclude each other"),
        ({"guided_json": 5}, "guided_json", "a string or an object"),
        ({"truncation": "middle"}, "truncation", "auto or disabled"),
        ({"include": ["everything"]}, "include", "include has 'everything'"),
        ({"top_logprobs": 2}, "top_logprobs", LOGPROBS),
        ({"top_logprobs": 21, "include": [LOGPROBS]}, "top_logprobs", "between 0 and 20"),
        ({"tools": [WEATHER], "include": [LOGPROBS]}, "include", "together with tools"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options", "`stream` is true"),
        ({"reasoning": {"effort": "extreme"}}, "reasoning.effort", "must be one of"),
        ({"reasoning": "high"}, "reasoning", "an object"),
        ({"text": {"format": {"type": "regex"}}}, "text.format", "a regular expression"),
        ({"text": {"format": {**FORM, "strct": True}}}, "text.format", "unknown field 'strct'"),
        ({"text": {"format": {"type": "json_object", "shema": {}}}}, "text.format", "'shema'"),
        ({"text": {"format": {"type": "text", "grammer": "x"}}}, "text.format", "'grammer'"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "json_schema"),
        ({"text": {"format": {**FORM, "schema": None}}}, "text.format", "a JSON schema"),
        ({"text": {"format": {"type": "json_schema", "json_schema": FORM}}}, "text.format",
         '"name": ...'),
        ({"text": {"format": FORM}, "structured_outputs": {"regex": "a"}}, "structured_outputs",
         "text.format and structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "tools": [WEATHER], "tool_choice": "required"},
         "tool_choice", "structured_outputs and a forced tool_choice"),
        ({"tools": [NESTED]}, "tools", "stands beside its type"),
        ({"tools": [SEARCH, {**WEATHER, "name": "a b"}]}, "tools", "tools[1].name must have"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{**WEATHER, "name": "a b"}]}]},
         "tools", "tools[0].tools[0].name must have"),
        ({"tools": [WEATHER, WEATHER]}, "tools", "weather twice"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools", "tools[0] must be"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [NESTED]}]}, "tools",
         "tools[0].tools[0] must be"),
        ({"tools": ["weather"]}, "tools", "tools[0]"),
        ({"tools": [{**WEATHER, "parameters": [1]}]}, "tools", "tools[0].parameters must"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": "weather"}, "tool_choice", "'weather'"),
        ({"tools": [WEATHER], "tool_choice": {"type": "web_search"}}, "tool_choice", "no tools"),
        ({"tools": [WEATHER], "tool_choice": OTHER}, "tool_choice", "'other'"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "auto",
                                              "tools": [OTHER]}}, "tool_choice", "'other'"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "auto",
                                              "tools": [SEARCH]}}, "tool_choice", "web_search"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice",
         "tool_choice must have the mode"),
        ({"metadata": {"a": 1}}, "metadata", "metadata"),
        ({"instructions": ["a"]}, "instructions", "a string"),
    ],
    ids=str,
)  # fmt: skip
def test_a_bad_request_is_refused(fields, param, named):
    api = tool_api(says(ANSWER)) if "tools" in fields else Api()
    response = api.post(PATH, **{"input": "hi", **fields})
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert error["param"] == param
    assert named in error["message"]
    assert ask(api).status_code == 200


@pytest.mark.parametrize(
    ("status", "change"),
    [
        (401, {"key": "other"}),
        (404, {"model": "other"}),
        (405, {"method": "GET"}),
        (413, {"input": "x" * 6000}),
        (429, {"queued": 2}),
        (500, {"script": ZeroDivisionError("secret")}),
        (503, {"ready": False}),
    ],
    ids=lambda value: value if isinstance(value, int) else "",
)
@pytest.mark.parametrize("stream", [False, True])
def test_other_errors_have_openais_format(status, change, stream):
    def raising(engine, number, prompt, params):
        yield change["script"]

    limits = ClientLimits(max_body_bytes=4096, max_queued_requests=2)
    script = {"script": raising} if "script" in change else {}
    api = Api(http=limits, api_keys=("k",), key=change.get("key", "k"), **script)
    api.context.ready = change.get("ready", True)
    for _ in range(change.get("queued", 0)):
        api.context.backlog.enter(1)
    body = {"input": "hi", "stream": stream, **change}
    response = api.request(change.get("method", "POST"), PATH, json={
        name: body[name] for name in ("input", "stream", "model") if name in body
    })  # fmt: skip
    assert response.status_code == status, response.text
    assert "secret" not in error_of(response)["message"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineDead("the engine was killed by SIGKILL"), "server_error"),
        (TooManyRequests("the queue is full", retry_after_s=1), "rate_limit_exceeded"),
        (ZeroDivisionError("secret"), "server_error"),
    ],
    ids=["engine", "queue", "bug"],
)
def test_a_failure_in_the_middle_ends_the_stream_as_a_failed_response(error, code):
    def fails(engine, number, prompt, params):
        yield Output(number, [40])
        yield error

    events = events_of(ask(Api(fails), stream=True))
    told = events[-1]
    assert told["type"] == "response.failed"
    assert told["response"]["status"] == "failed"
    assert told["response"]["error"]["code"] == code
    assert "secret" not in told["response"]["error"]["message"]
    assert told["response"]["id"] == events[0]["response"]["id"]
    Response.model_validate(told["response"], strict=True)


def test_a_failure_behind_pings_only_is_an_error_event():
    def late(engine, number, prompt, params):
        yield 1.0  # 20 times the silence: on a busy machine a comment may come late
        yield EngineDead("the engine was killed by SIGKILL")

    response = ask(Api(late, http=ClientLimits(silent_s=0.05)), stream=True)
    assert response.status_code == 200
    *pings, told = response.text.removesuffix("\n\n").split("\n\n")
    assert set(pings) == {": keep-alive"}
    event, data = told.split("\n")
    assert event == "event: error"
    message = "the engine was killed by SIGKILL"
    wanted = {"type": "error", "code": "server_error", "message": message, "param": None}
    assert json.loads(data.removeprefix("data: ")) == {**wanted, "sequence_number": 0}
