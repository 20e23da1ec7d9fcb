"""The contract of vLLM's further routes for text: several conversations, render routes, beams."""

import json

import pytest

from tests.contract.table import (
    NO_COUNT,
    NO_FLAG,
    NO_LIST,
    NO_NUMBER,
    NO_TEXT,
    accepted,
    ask,
    cases,
    refused,
    run,
    server,
    without,
)

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
BATCH = {"messages": [HI, HI]}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
SAMPLING_GOOD = {
    "model": ("tiny", "alias", None),
    "max_tokens": (1, 100_000, None),
    "seed": (0, 2**63 - 1, None),
    "temperature": (0, 2, None),
    "top_k": (-1, 50),
    "stop": ("x", ["a", "b"], None),
    "logit_bias": ({}, {"5": 1}, None),
    "priority": (0, -1, 7),
    "cache_salt": ("team", None),
    "timeout": (1, 30.5, None),
    "stream": (False, None),
}
SAMPLING_BAD = {
    "max_tokens": (-1, *NO_COUNT),
    "seed": (2**64, *NO_COUNT),
    "temperature": (-0.1, *NO_NUMBER),
    "top_k": (-2, *NO_COUNT),
    "stop": (1, {}, [1]),
    "logit_bias": ({"x": 1}, {"9999": 1}, "x"),
    "priority": (2**40, *NO_COUNT),
    "cache_salt": ("a/b", *NO_TEXT),
    "timeout": (0, *NO_NUMBER),
}


@cases(
    accepted(f"{CHAT}/batch", BATCH, SAMPLING_GOOD),
    accepted(
        f"{CHAT}/batch",
        BATCH,
        {
            "messages": ([HI], [HI] * 9, [HI, [*HI, {"role": "assistant", "content": "a"}, *HI]]),
            "n": (1, None),
            "logprobs": (True, False, None),
            "echo": (True, False),
            "tools": ([], None),
            "tool_choice": ("none", None),
            "use_beam_search": (False, None),
            "response_format": ({"type": "text"}, None),
            "return_token_ids": (True, False),
        },
    ),
    refused(f"{CHAT}/batch", BATCH, SAMPLING_BAD),
    refused(
        f"{CHAT}/batch",
        BATCH,
        {
            "messages": ([], [[]], [HI, []], HI, ["hi"], [[1]], [HI] * 1025, *NO_LIST),
            "n": (0, 2, *NO_COUNT),
            "stream": (True, *NO_FLAG),
            "tools": (TOOLS, "x", [1]),
            "use_beam_search": (True, *NO_FLAG),
            "prompt_logprobs": (0, 1, *NO_COUNT),
            "return_prompt_text": (True,),
            "return_progress": (True,),
            "top_logprobs": (2, 21, *NO_COUNT),
            "best_of": (2,),
        },
    ),
    without(f"{CHAT}/batch", BATCH, "messages"),
)
def test_several_conversations_are_accepted_or_refused_with_their_field(case):
    run(case)


@cases(
    accepted(f"{CHAT}/render", {"messages": HI}, SAMPLING_GOOD),
    accepted(f"{TEXT}/render", {"prompt": "hi"}, SAMPLING_GOOD),
    accepted(f"{CHAT}/render", {"messages": HI}, {"return_prompt_text": (True, False, None)}),
    accepted(f"{TEXT}/render", {"prompt": "hi"}, {"prompt": ("a", ["a", "b"], [5], [[5], [6]])}),
    refused(f"{CHAT}/render", {"messages": HI}, SAMPLING_BAD),
    refused(f"{TEXT}/render", {"prompt": "hi"}, SAMPLING_BAD),
    refused(
        f"{CHAT}/render",
        {"messages": HI},
        {"messages": ([], "hi", [1]), "return_token_offsets": (True, *NO_FLAG)},
    ),
    refused(
        f"{TEXT}/render",
        {"prompt": "hi"},
        {"prompt": ([], [[]], {}, 1, [9999]), "return_token_offsets": (True, *NO_FLAG)},
    ),
    without(f"{CHAT}/render", {"messages": HI}, "messages"),
    without(f"{TEXT}/render", {"prompt": "hi"}, "prompt"),
)
def test_prompts_are_rendered_or_refused_with_their_field(case):
    run(case)


BEAMS = {"use_beam_search": True, "n": 2, "max_tokens": 3}
NO_BEAMS = {
    "n": (0, 11, *NO_COUNT),
    "length_penalty": NO_NUMBER,
    "temperature": (-1, *NO_NUMBER),
    "stream": (True,),
    "presence_penalty": (1,),
    "logit_bias": ({"5": 1},),
    "min_tokens": (2,),
}


@cases(
    refused(CHAT, {"messages": HI, **BEAMS}, NO_BEAMS),
    refused(TEXT, {"prompt": "hi", **BEAMS}, NO_BEAMS),
    refused(TEXT, {"prompt": "hi", **BEAMS}, {"use_beam_search": NO_FLAG}),
)
def test_what_a_beam_search_cannot_have_is_refused_with_its_field(case):
    run(case)


TOKENS = "/inference/v1/generate"
IDS = {"token_ids": [5, 6], "sampling_params": {}}


@cases(
    accepted(
        TOKENS,
        IDS,
        {
            "token_ids": ([5], [5] * 50),
            "sampling_params": ({}, {"max_tokens": 3, "n": 2}, {"stop_token_ids": [7], "seed": 1}),
            "sampling_params.temperature": (0, 0.5, None),
            "sampling_params.logprobs": (0, 1, None),
            "sampling_params.detokenize": (True, False),
            "request_id": ("a-1", None),
            "stream": (False, None, True),
            "stream_options": (None,),
            "features": (None,),
        },
    ),
    refused(
        TOKENS,
        IDS,
        {
            "token_ids": ([], [-1], [9999], ["x"], *NO_LIST),
            "sampling_params": ([], "x", 1, {"more": 1}, {"prompt": "a"}, {"max_tokens": "x"}),
            "sampling_params.temperature": (-1, "x"),
            "sampling_params.use_beam_search": (True,),
            "request_id": ("a b", *NO_TEXT),
            "stream": NO_FLAG,
            "stream_options": ({"include_usage": True}, *NO_LIST),
            "features": ({"a": 1},),
            "kv_transfer_params": ({"a": 1},),
            "ec_transfer_params": ({"a": 1},),
            "priority": (2**40, *NO_COUNT),
        },
    ),
    without(TOKENS, IDS, "token_ids", "sampling_params"),
)
def test_tokens_are_continued_or_refused_with_their_field(case):
    run(case)


def test_a_rendered_prompt_is_continued_as_its_completion():
    api = server()
    (prompt,) = api.post(f"{TEXT}/render", prompt="hi", seed=3, max_tokens=4, logprobs=1).json()
    asked = {name: prompt[name] for name in ("token_ids", "sampling_params")}
    before = len(api.engine.asked)
    body = api.post(TOKENS, **asked, request_id="mine").json()
    assert body["request_id"] == "mine"
    assert body["choices"][0].keys() == {"index", "logprobs", "finish_reason", "token_ids"}
    wanted = api.post(TEXT, prompt="hi", seed=3, max_tokens=4, logprobs=1, return_token_ids=True)
    assert body["choices"][0]["token_ids"] == wanted.json()["choices"][0]["token_ids"]
    (one, first), (other, second) = api.engine.asked[before:]
    assert (one, first) == (other, second)


def chunks_of(api, **fields):
    """The chunks of a streamed response, before its last event."""
    response = api.post(TOKENS, token_ids=[5, 6], stream=True, **fields)
    assert response.status_code == 200, response.text
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_the_chunks_of_tokens_make_the_whole_response():
    api = server()
    params = {"n": 2, "seed": 3, "max_tokens": 4, "logprobs": 1, "prompt_logprobs": 1}
    whole = api.post(TOKENS, token_ids=[5, 6], sampling_params=params, request_id="mine").json()
    options = {"include_usage": True}
    made = chunks_of(api, sampling_params=params, stream_options=options, request_id="mine")
    assert {chunk["request_id"] for chunk in made} == {"mine"}
    assert (made[-1]["choices"], made[-1]["usage"]) == ([], whole["usage"])
    assert [chunk["usage"] for chunk in made[:-1]] == [None] * (len(made) - 1)
    scored = [chunk["prompt_logprobs"] for chunk in made if "prompt_logprobs" in chunk]
    assert scored[0] == whole["prompt_logprobs"]
    for wanted in whole["choices"]:
        parts = [c["choices"][0] for c in made[:-1] if c["choices"][0]["index"] == wanted["index"]]
        assert len(parts) > 1
        assert [token for part in parts for token in part["token_ids"]] == wanted["token_ids"]
        entries = [entry for part in parts for entry in part["logprobs"]["content"]]
        assert entries == wanted["logprobs"]["content"]
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == wanted["finish_reason"]


def test_the_usage_of_streamed_tokens_is_sent_only_if_it_is_wanted():
    api = server()
    plain = chunks_of(api, sampling_params={"max_tokens": 3})
    assert [chunk["usage"] for chunk in plain] == [None] * len(plain)
    options = {"include_usage": True, "continuous_usage_stats": True}
    counted = chunks_of(api, sampling_params={"max_tokens": 3}, stream_options=options)
    found = [chunk["usage"]["completion_tokens"] for chunk in counted]
    assert found == [*range(1, len(plain) + 1), len(plain)]


def test_tokens_end_with_the_context_unless_max_tokens_is_set():
    api = server()
    assert api.post(TOKENS, **IDS).status_code == 200
    assert api.engine.asked[-1][1].max_tokens == api.context.max_model_len - 2
    api.post(TOKENS, **{**IDS, "sampling_params": {"max_tokens": 3}})
    assert api.engine.asked[-1][1].max_tokens == 3


@pytest.mark.parametrize("path", [f"{CHAT}/batch", f"{CHAT}/render", f"{TEXT}/render"])
def test_a_model_that_does_not_exist_is_404(path):
    body = {"prompt": "hi"} if path.startswith(TEXT) else {"messages": HI}
    body = {"messages": [HI]} if path.endswith("batch") else body
    ask(server(), "POST", path, 404, "nobody", json={**body, "model": "nobody"})
