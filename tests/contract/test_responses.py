"""The contract of /v1/responses: fields, limits, errors, streams."""

import pytest

from tests.api.fakes import ANSWER, error_of, named_events_of
from tests.contract.table import (
    NO_COUNT,
    NO_FLAG,
    NO_NUMBER,
    NO_TEXT,
    accepted,
    cases,
    refused,
    run,
    server,
    without,
)

PATH, COUNT = "/v1/responses", "/v1/responses/input_tokens"
HI = [{"role": "user", "content": "hi"}]
BODY = {"input": "hi"}
GOOD = {
    "model": ("tiny", "alias", None),
    "input": ("a", HI, [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]),
    "instructions": ("Be kind.", None),
    "max_output_tokens": (1, 5, 100_000, None),
    "temperature": (0, 0.7, 2, None),
    "top_p": (0, 0.5, 1, None),
    "stream": (False, None),
    "metadata": ({}, {"a": "b"}, None),
    "tools": ([],),
    "text": ({"format": {"type": "text"}},),
    "store": (True, False, None),
    "truncation": ("disabled",),
    "parallel_tool_calls": (True, False),
    "user": ("me",),
}
BAD = {
    "input": (1, {}, True, [1], [{"type": "nothing"}], [{"role": "user", "content": 1}]),
    "instructions": (1, {}, True),
    "max_output_tokens": (-1, *NO_COUNT),
    "temperature": (-0.1, *NO_NUMBER),
    "top_p": (-0.1, 1.1, *NO_NUMBER),
    "top_logprobs": (-1, 21, *NO_COUNT),
    "stream": NO_FLAG,
    "tools": ("x", 1, {}, [1], [{}]),
    "text": ("x", 1, []),
    "store": NO_FLAG,
    "previous_response_id": NO_TEXT,
    "max_tokens": (3,),
    "n": (2,),
}


@cases(
    accepted(PATH, BODY, GOOD),
    refused(PATH, BODY, BAD),
    accepted(COUNT, BODY, {"input": GOOD["input"]}),
    refused(COUNT, BODY, {"input": BAD["input"]}),
    without(COUNT, BODY, "input"),
)
def test_a_value_is_accepted_or_refused_with_its_field(case):
    run(case)


@pytest.mark.parametrize("path", [PATH, COUNT])
def test_a_model_that_does_not_exist_is_404(path):
    response = server().post(path, model="nobody", **BODY)
    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found"


def text_of(body):
    (item,) = [item for item in body["output"] if item["type"] == "message"]
    return "".join(part["text"] for part in item["content"])


def test_the_defaults_of_a_response():
    body = server().post(PATH, **BODY).json()
    assert (body["object"], body["status"], body["model"]) == ("response", "completed", "tiny")
    assert (body["error"], body["incomplete_details"]) == (None, None)
    assert text_of(body) == ANSWER


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ({}, "completed"),
        ({"max_output_tokens": 3}, "incomplete"),
        ({"instructions": "Be kind."}, "completed"),
        ({"input": HI}, "completed"),
    ],
    ids=str,
)
def test_a_stream_has_the_text_status_and_usage_of_the_whole_response(more, status):
    whole = server().post(PATH, **{**BODY, **more}).json()
    events = named_events_of(server().post(PATH, **{**BODY, **more, "stream": True}))
    assert events[0]["type"] == "response.created"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = events[-1]["response"]
    assert (last["status"], whole["status"]) == (status, status)
    texts = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    assert "".join(texts) == text_of(last) == text_of(whole)
    assert last["usage"] == whole["usage"]
