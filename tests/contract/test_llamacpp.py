"""The contract of llama-server's routes: fields, limits, errors, streams."""

import json

import pytest

from tests.api.fakes import ANSWER
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

TEXT, EMBED, TEMPLATE = "/completion", "/embedding", "/apply-template"
HI = [{"role": "user", "content": "hi"}]
BODY = {"prompt": "hi"}
GOOD = {
    "model": ("tiny", "alias", None),
    "prompt": (
        "a",
        [5, 6],
        ["a", "b"],
        ["a", 5, "b"],
        [[5], [6, 7]],
        ["a", [5]],
        {"prompt_string": "a"},
        [{"prompt_string": "a"}, "b"],
    ),
    "n_predict": (-1, 0, 1, 5, None),
    "max_tokens": (-1, 1, 5),
    "n_cmpl": (1, 2, None),
    "seed": (0, 1, -1, None),
    "temperature": (-1, 0, 0.7, 2),
    "top_k": (-1, 0, 1, 40),
    "top_p": (0.1, 0.95, 1),
    "min_p": (0, 0.05, 1),
    "repeat_penalty": (1, 1.1),
    "repeat_last_n": (-1,),
    "presence_penalty": (-2, 0, 2),
    "frequency_penalty": (-2, 0, 2),
    "logit_bias": ([], [[5, 1]], [[5, False]], [["a", -1.5]], {"5": 1}, {"a": False}, None),
    "ignore_eos": (False, True),
    "stop": ("x", ["a", "b"], [], None),
    "n_probs": (0, 1, 5),
    "n_indent": (-1, 0, 2),
    "t_max_predict_ms": (-1, 0, 60_000),
    "grammar": ("", None),
    "lora": ([], None),
    "return_tokens": (False, True),
    "timings_per_token": (False, True),
    "response_fields": ([], ["content"], ["generation_settings/seed"], ["nothing"]),
    "priority": (0, -1, 7),
    "cache_salt": ("team-1", None),
    "timeout": (60, 30.5, None),
    "stream": (False, None),
    "unknown_field": (1, [1], "x"),
}
BAD = {
    "model": NO_TEXT,
    "prompt": (1, True, [], [9999], [-1], [1.5], [[]], [True], {"prompt_string": 1}),
    "n_predict": NO_COUNT,
    "n_cmpl": (-1, 129, *NO_COUNT),
    "seed": NO_COUNT,
    "temperature": NO_NUMBER,
    "top_k": (2**31, *NO_COUNT),
    "top_p": (-0.1, 1.1, *NO_NUMBER),
    "min_p": (-0.1, 1.1, *NO_NUMBER),
    "repeat_penalty": (-1, *NO_NUMBER),
    "repeat_last_n": NO_COUNT,
    "presence_penalty": (-2.1, 2.1, *NO_NUMBER),
    "frequency_penalty": (-2.1, 2.1, *NO_NUMBER),
    "logit_bias": ("x", 1, [5], [[5]], [[5, "x"]], [[5, True]], [[9999, 1]], {"5": "x"}),
    "ignore_eos": NO_FLAG,
    "stop": (1, {}, [1]),
    "n_probs": (-1, *NO_COUNT),
    "n_indent": NO_COUNT,
    "t_max_predict_ms": NO_NUMBER,
    "grammar": NO_TEXT,
    "json_schema": ("x", 1, [1]),
    "lora": ([{"id": 0, "scale": 1}], [1], "x", 1, {}),
    "return_tokens": NO_FLAG,
    "response_fields": ([1], *NO_LIST),
    "cache_salt": ("a/b", "x" * 129, *NO_TEXT),
    "timeout": (0, -1, *NO_NUMBER),
    "stream": NO_FLAG,
}


@cases(
    accepted(TEXT, BODY, GOOD),
    refused(TEXT, BODY, BAD),
    without(TEXT, BODY, "prompt"),
    refused("/completions", BODY, {"n_predict": ("x",), "prompt": (1,)}),
)
def test_a_value_of_a_completion_is_accepted_or_refused_with_its_field(case):
    run(case)


@cases(
    accepted(
        EMBED,
        {"content": "hi"},
        {
            "content": ("a", ["a", "b"], [5, 6], [[5], [6]], {"prompt_string": "a"}),
            "embd_normalize": (0, 1, 2, 3, None),
            "model": ("tiny", "alias"),
        },
    ),
    accepted("/embeddings", {}, {"input": ("a", ["a", "b"], [5, 6])}),
    refused(
        EMBED,
        {"content": "hi"},
        {
            "content": (1, True, [9999], [1.5]),
            "embd_normalize": (-1, -2, *NO_COUNT),
            "timeout": (0, -1, *NO_NUMBER),
        },
    ),
    refused("/embeddings", {}, {"input": (1, True, [9999])}),
    without(EMBED, {"content": "hi"}, "content"),
)
def test_a_value_of_an_embedding_is_accepted_or_refused_with_its_field(case):
    run(case, "last")


@cases(
    accepted(
        TEMPLATE, {"messages": HI}, {"messages": ([{"role": "system", "content": "a"}, *HI],)}
    ),
    refused(TEMPLATE, {"messages": HI}, {"messages": ("hi", 1, {}, [], [1], [{"content": "x"}])}),
    without(TEMPLATE, {"messages": HI}, "messages"),
    accepted("/tokenize", {}, {"content": ("a", "")}),
    accepted("/tokenize", {"content": "a"}, {"with_pieces": (True, False)}),
    accepted("/tokenize", {"content": "a"}, {"add_special": (True, False)}),
    refused("/tokenize", {}, {"content": (1, {}, True)}),
    refused("/tokenize", {"content": "a"}, {"with_pieces": NO_FLAG}),
    accepted("/detokenize", {}, {"tokens": ([], [5], [5, 6])}),
    refused("/detokenize", {}, {"tokens": ([9999], [-1], [1.5], ["x"], *NO_LIST)}),
    without("/detokenize", {"tokens": [5]}, "tokens"),
)
def test_a_value_of_another_route_is_accepted_or_refused_with_its_field(case):
    run(case)


@pytest.mark.parametrize(
    ("method", "path", "status", "named"),
    [
        ("GET", "/slots", 200, ""),
        ("GET", "/slots?fail_on_no_slot=1", 200, ""),
        ("GET", "/slots?model=tiny", 200, ""),
        ("GET", "/slots?model=nobody", 404, "nobody"),
        ("POST", "/slots/0", 400, "action"),
        ("POST", "/slots/0?action=sleep", 400, "action"),
        ("POST", "/slots/0?action=save", 400, "action"),
        ("GET", "/props", 200, ""),
        ("GET", "/props?model=tiny", 200, ""),
        ("GET", "/props?model=nobody", 404, "nobody"),
        ("POST", "/props", 405, "options"),
        ("GET", "/lora-adapters", 200, ""),
        ("GET", "/models", 200, ""),
        ("GET", "/completion", 405, "POST"),
        ("DELETE", "/slots", 405, "GET"),
    ],
)
def test_a_request_without_a_body_is_served_or_refused(method, path, status, named):
    ask(server(), method, path, status, named)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ([], ""),
        ([{"id": 0}], "id"),
        ([{"id": 0, "scale": 1}], "id"),
        ([{"id": 0, "scale": "x"}], "scale"),
        ([{"scale": 1}], "id"),
        ({}, ""),
        ("x", ""),
    ],
)
def test_adapters_are_changed_by_a_list_of_known_ids(body, named):
    status = 200 if body == [] else 400
    ask(server(), "POST", "/lora-adapters", status, named, json=body)


def test_a_body_that_is_no_json_is_refused_in_the_format_of_llama_server():
    for path in (TEXT, EMBED, TEMPLATE, "/infill"):
        response = ask(server(), "POST", path, 400, "JSON", content=b"{", headers=JSON)
        assert response.json()["error"]["type"] == "invalid_request_error"


JSON = {"content-type": "application/json"}


def test_the_defaults_of_a_completion():
    body = server().post(TEXT, prompt="hi").json()
    assert (body["content"], body["stop"], body["stop_type"]) == (ANSWER, True, "eos")
    shown = body["generation_settings"]
    assert (shown["temperature"], shown["top_k"]) == (0.8, 40)
    assert (shown["top_p"], shown["min_p"], shown["n_predict"]) == (0.95, 0.05, -1)


def test_a_model_that_does_not_exist_is_404():
    error = server().post(TEXT, model="nobody", prompt="hi").json()["error"]
    assert (error["code"], error["type"]) == (404, "not_found_error")


MORE = {
    "plain": {},
    "length": {"n_predict": 3},
    "stop": {"stop": ["wör"]},
    "no stop": {"stop": ["zzz"]},
    "tokens": {"return_tokens": True},
    "several": {"n_cmpl": 2},
    "prompts": {"prompt": ["a", "b"]},
    "probabilities": {"n_probs": 1, "n_predict": 4},
}
ENDS = ("stop_type", "stopping_word", "tokens_predicted", "tokens_evaluated", "truncated", "model")


@pytest.mark.parametrize("name", MORE)
def test_a_stream_has_the_text_and_the_end_of_the_whole_response(name):
    body = {**BODY, **MORE[name]}
    whole = server().post(TEXT, **body).json()
    stream = server().post(TEXT, **body, stream=True)
    lines = stream.text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    for index, one in enumerate(whole if isinstance(whole, list) else [whole]):
        parts = [event for event in events if event["index"] == index]
        assert [part["stop"] for part in parts] == [*[False] * (len(parts) - 1), True]
        assert "".join(part["content"] for part in parts) == one["content"]
        assert {name: parts[-1].get(name) for name in ENDS} == {n: one.get(n) for n in ENDS}
        if "return_tokens" in body:
            assert [token for part in parts for token in part["tokens"]] == one["tokens"]
        if "n_probs" in body:
            chosen = [c for part in parts for c in part.get("completion_probabilities") or ()]
            assert chosen == one["completion_probabilities"]


def test_a_bad_stream_is_refused_before_it_begins():
    response = server().post(TEXT, prompt="hi", stream=True, n_predict="x")
    assert response.status_code == 400
    assert "n_predict" in json.loads(response.content)["error"]["message"]
