"""The contract of /v1/messages: fields, limits, errors, streams."""

import pytest

from tests.api.fakes import ANSWER, named_events_of
from tests.contract.table import (
    NO_COUNT,
    NO_FLAG,
    NO_LIST,
    NO_NUMBER,
    NO_OBJECT,
    accepted,
    cases,
    refused,
    run,
    server,
    without,
)

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HI = [{"role": "user", "content": "hi"}]
BODY = {"messages": HI, "max_tokens": 30}
MESSAGES = (
    [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
    [*HI, {"role": "assistant", "content": "b"}, *HI],
    [*HI, {"role": "assistant", "content": [{"type": "text", "text": "b"}]}, *HI],
    [*HI, *HI],
)
BAD_MESSAGES = (
    [],
    "hi",
    1,
    {},
    [1],
    ["hi"],
    [{"role": "user"}],
    [{"content": "x"}],
    [{"role": "user", "content": 1}],
    [{"role": "user", "content": [{"type": "image"}]}],
    [{"role": "user", "content": ["hi"]}],
)
GOOD = {
    "model": ("tiny", "alias"),
    "max_tokens": (1, 5, 100_000),
    "temperature": (0, 0.5, 1),
    "top_p": (0, 0.5, 1),
    "top_k": (0, 1, 40),
    "stop_sequences": ([], ["x"], ["a", "b"]),
    "system": ("Be kind.", [{"type": "text", "text": "Be kind."}]),
    "metadata": ({"user_id": "me"}, {}),
    "stream": (False,),
    "thinking": ({"type": "disabled"},),
    "tools": ([],),
    "messages": MESSAGES,
}
BAD = {
    "max_tokens": (-1, *NO_COUNT),
    "temperature": (-0.1, *NO_NUMBER),
    "top_p": (-0.1, 1.1, *NO_NUMBER),
    "top_k": (-2, *NO_COUNT),
    "stop_sequences": ([1], ["x"] * 65, *NO_LIST),
    "system": (1, True, {}, [1], [{"type": "image"}]),
    "stream": NO_FLAG,
    "thinking": ("x", 1, [], {"type": "maybe"}),
    "tools": ("x", 1, {}, [1], [{}]),
    "tool_choice": ("auto", 1, [], {"type": "never"}),
    "metadata": NO_OBJECT,
    "messages": BAD_MESSAGES,
}


@cases(
    accepted(PATH, BODY, GOOD),
    refused(PATH, BODY, BAD),
    without(PATH, BODY, "messages", "max_tokens"),
    accepted(COUNT, {"messages": HI}, {"messages": MESSAGES, "system": GOOD["system"]}),
    refused(COUNT, {"messages": HI}, {"messages": BAD_MESSAGES, "system": BAD["system"]}),
    without(COUNT, {"messages": HI}, "messages"),
)
def test_a_value_is_accepted_or_refused_with_its_field(case):
    run(case)


@pytest.mark.parametrize("path", [PATH, COUNT])
def test_a_model_that_does_not_exist_is_404(path):
    response = server().post(path, model="nobody", **BODY)
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "not_found_error"


def test_the_defaults_of_a_message():
    body = server().post(PATH, **BODY).json()
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", "tiny")
    assert body["content"] == [{"type": "text", "text": ANSWER}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({}, "end_turn"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"stop_sequences": ["wör"]}, "stop_sequence"),
        ({"stop_sequences": ["zzz"]}, "end_turn"),
        ({"system": "Be kind."}, "end_turn"),
    ],
    ids=str,
)
def test_a_stream_has_the_text_reason_and_usage_of_the_whole_response(more, reason):
    whole = server().post(PATH, **{**BODY, **more}).json()
    events = named_events_of(server().post(PATH, **{**BODY, **more, "stream": True}))
    kinds = [event["type"] for event in events if event["type"] != "ping"]
    assert (kinds[0], kinds[-2], kinds[-1]) == ("message_start", "message_delta", "message_stop")
    texts = [e["delta"]["text"] for e in events if e["type"] == "content_block_delta"]
    assert "".join(texts) == "".join(block["text"] for block in whole["content"])
    (ended,) = [event for event in events if event["type"] == "message_delta"]
    assert ended["delta"]["stop_reason"] == whole["stop_reason"] == reason
    assert ended["delta"]["stop_sequence"] == whole["stop_sequence"]
    assert ended["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
