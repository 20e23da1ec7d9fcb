"""The contract of /v1/chat/completions and /v1/completions: fields, limits, errors, streams."""

import pytest

from tests.api.fakes import ANSWER, error_of, events_of
from tests.contract.table import (
    NO_COUNT,
    NO_FLAG,
    NO_LIST,
    NO_NUMBER,
    NO_OBJECT,
    NO_TEXT,
    accepted,
    cases,
    refused,
    run,
    server,
    without,
)

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
BODIES = {CHAT: {"messages": HI}, TEXT: {"prompt": "hi"}}

GOOD = {
    "model": ("tiny", "alias", None, ""),
    "n": (1, 2, 128, None),
    "max_tokens": (1, 5, 100_000, None),
    "min_tokens": (0, 3),
    "seed": (0, 1, -1, 2**63 - 1, None),
    "temperature": (0, 0.7, 2, None),
    "top_p": (0, 0.1, 1, None),
    "top_k": (-1, 0, 1, 50),
    "min_p": (0, 0.5, 1),
    "presence_penalty": (-2, 0, 2),
    "frequency_penalty": (-2, 0.5, 2),
    "repetition_penalty": (0.5, 1, 2),
    "logit_bias": ({}, {"5": 1}, {"5": -100}, None),
    "allowed_token_ids": ([5, 6], None),
    "stop": ("x", ["a", "b"], [], None),
    "stop_token_ids": ([], [7]),
    "ignore_eos": (False, True),
    "skip_special_tokens": (False, True),
    "prompt_logprobs": (0, 1, None),
    "priority": (0, -1, 7),
    "cache_salt": ("team-1", None),
    "timeout": (60, 30.5, None),
    "user": ("me", None),
    "stream": (False, None),
    "return_token_ids": (True, False),
    "response_format": ({"type": "text"}, None),
    "unknown_field": (1, [1], "x"),
}
BAD = {
    "n": (0, -1, 129, *NO_COUNT),
    "max_tokens": (-1, *NO_COUNT),
    "min_tokens": (-1, 2**40, *NO_COUNT),
    "seed": (2**64, *NO_COUNT),
    "temperature": (-0.1, -1, *NO_NUMBER),
    "top_p": (-0.1, 1.1, *NO_NUMBER),
    "top_k": (-2, 2**31, *NO_COUNT),
    "min_p": (-0.1, 1.1, *NO_NUMBER),
    "presence_penalty": (-2.1, 2.1, *NO_NUMBER),
    "frequency_penalty": (-2.1, 2.1, *NO_NUMBER),
    "repetition_penalty": (0, -1, *NO_NUMBER),
    "logit_bias": ({"x": 1}, {"9999": 1}, {"5": "x"}, "x", 1, [1]),
    "allowed_token_ids": ([], [9999], [-1], "x", [1.5]),
    "stop": (1, {}, [1], ["x"] * 65),
    "stop_token_ids": (["x"], *NO_LIST),
    "ignore_eos": NO_FLAG,
    "prompt_logprobs": (-2, 21, *NO_COUNT),
    "priority": (2**40, *NO_COUNT),
    "cache_salt": ("a/b", "a@b", "x" * 129, *NO_TEXT),
    "timeout": (0, -1, *NO_NUMBER),
    "stream": NO_FLAG,
    "stream_options": (*NO_OBJECT, {"include_usage": True}),
    "response_format": ("json", 1, {"type": "xml"}, {"type": "json_schema"}),
}
GOOD_CHAT = {
    "logprobs": (True, False, None),
    "max_completion_tokens": (1, 5),
    "reasoning_effort": ("none", "low", "high"),
    "chat_template_kwargs": ({}, {"a": 1}),
    "messages": (
        [{"role": "system", "content": "a"}, *HI],
        [*HI, {"role": "assistant", "content": "b"}, *HI],
        [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        [{"role": "user", "content": "a", "name": "me"}],
    ),
    "tools": ([],),
}
BAD_CHAT = {
    "messages": (
        [],
        "hi",
        1,
        {},
        [1],
        ["hi"],
        [{"content": "x"}],
        [{"role": "user", "content": 1}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
    ),
    "top_logprobs": (2, -1, 21, *NO_COUNT),
    "max_completion_tokens": (-1, *NO_COUNT),
    "logprobs": (1.5, "x", [], {}),
    "tools": ("x", 1, {}, [1], [{}]),
    "functions": ([{"name": "f"}],),
    "chat_template_kwargs": NO_OBJECT,
}
GOOD_TEXT = {
    "prompt": ("a", ["a", "b"], [5, 6], [[5], [6, 7]]),
    "echo": (True, False),
    "logprobs": (0, 1, 5, None),
}
BAD_TEXT = {
    "prompt": ("", [], 1, {}, ["a", 1], [9999], [[]], ["a"] * 1025),
    "echo": NO_FLAG,
    "logprobs": (-2, 21, "x", [], {}, 1.5),
}


@cases(
    *(accepted(path, body, GOOD) for path, body in BODIES.items()),
    *(refused(path, body, BAD) for path, body in BODIES.items()),
    accepted(CHAT, BODIES[CHAT], GOOD_CHAT),
    refused(CHAT, BODIES[CHAT], BAD_CHAT),
    accepted(TEXT, BODIES[TEXT], GOOD_TEXT),
    refused(TEXT, BODIES[TEXT], BAD_TEXT),
    without(CHAT, BODIES[CHAT], "messages"),
    without(TEXT, BODIES[TEXT], "prompt"),
)
def test_a_value_is_accepted_or_refused_with_its_field(case):
    run(case)


@pytest.mark.parametrize("path", BODIES)
def test_a_model_that_does_not_exist_is_404(path):
    response = server().post(path, model="nobody", **BODIES[path])
    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found"


def test_the_defaults_of_a_chat():
    api = server()
    choice = api.post(CHAT, messages=HI).json()["choices"][0]
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    assert choice["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
    _, params = api.engine.asked[-1]
    assert (params.temperature, params.top_p, params.top_k, params.n) == (1.0, 1.0, 0, 1)


def test_the_defaults_of_a_completion():
    api = server()
    body = api.post(TEXT, prompt="hi").json()
    assert body["object"] == "text_completion"
    assert body["usage"]["completion_tokens"] == 16
    assert body["choices"][0]["finish_reason"] == "length"


BOTH = {
    "plain": {},
    "n": {"n": 2},
    "length": {"max_tokens": 3},
    "stop": {"stop": "wör"},
    "stop kept": {"stop": "wör", "include_stop_str_in_output": True},
    "no stop": {"stop": ["zzz"]},
    "ids": {"return_token_ids": True},
    "seed": {"seed": 1, "temperature": 0.3},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", BOTH)
def test_a_stream_has_the_text_finish_and_usage_of_the_whole_response(path, name):
    body = {"max_tokens": 30, **BODIES[path], **BOTH[name]}
    whole = server().post(path, **body).json()
    events = events_of(
        server().post(path, **body, stream=True, stream_options={"include_usage": True})
    )
    *_, last = events
    assert last["usage"] == whole["usage"]
    for choice in whole["choices"]:
        parts = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
        if path == CHAT:
            texts = [part["delta"].get("content") or "" for part in parts]
            assert "".join(texts) == choice["message"]["content"]
        else:
            assert "".join(part["text"] for part in parts) == choice["text"]
        (finish,) = {part["finish_reason"] for part in parts} - {None}
        assert finish == choice["finish_reason"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("field", ["n", "temperature", "stop"])
def test_a_bad_stream_is_refused_before_it_begins(path, field):
    bad = {"n": 0, "temperature": -1, "stop": [1]}[field]
    response = server().post(path, stream=True, **{**BODIES[path], field: bad})
    assert response.status_code == 400
    assert field in error_of(response)["message"]
