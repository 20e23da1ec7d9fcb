"""The contract of /v1/systemone, and of endpoints for vectors, scores and tokens."""

import pytest

from tests.api.fakes import error_of
from tests.contract.table import (
    NO_COUNT,
    NO_FLAG,
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

DECIDE = "/v1/systemone"
LONG = {"a first long text": None, "some other long text": None}  # several tokens in any model
URGENT = {"type": "noul", "instructions": "Is it urgent?"}
BODY = {"state": "hi", "questions": {"urgent": URGENT}}


def choice(count):
    return {"a": {"type": "choice", "criteria": {f"option {i}": None for i in range(count)}}}


def score(count):
    return {"a": {"type": "score", "criteria": [f"level {i}" for i in range(count)]}}


def as_texts(questions):
    return {name: {**question, "as_texts": True} for name, question in questions.items()}


GOOD = {
    "model": ("tiny", "alias", None),
    "state": ("a", 1, True, ["a"], {"a": {"b": None}}),
    "questions": (
        *({"a": {"type": "noul"}}, choice(1), choice(3), score(2), score(4)),
        {"a": {**URGENT, "as_texts": True}, "b": {**URGENT, "as_texts": False}},
        as_texts(choice(1)),
        as_texts(choice(2)),
        as_texts(score(4)),
    ),
    "instructions": ("Be strict.", {"a": 1}, None),
    "chat_template_kwargs": ({}, {"a": 1}, None),
    "priority": (0, -1, 5, 5.0, None),
    "cache_salt": ("team", None),
    "timeout": (60, 30.5, None),
}
BAD = {
    "questions": (
        {},
        choice(0),
        choice(27),
        as_texts(choice(257)),
        as_texts({"a": {"type": "choice", "criteria": {"b": None, " b": None}}}),
        {"a": {**URGENT, "as_texts": 1}},
        {"a": {**URGENT, "as_texts": None}},
        as_texts({f"q{i}": {"type": "choice", "criteria": LONG} for i in range(1000)}),
        score(1),
        score(11),
        {"": URGENT},
        {"a": {}},
        {"a": {"type": "text"}},
        {"a": {**URGENT, "more": 1}},
        {"a": {"type": "choice"}},
        {"a": {"type": "choice", "criteria": ["b"]}},
        {"a": {"type": "choice", "criteria": {" ": None}}},
        {"a": {"type": "score", "criteria": ["b", "b"]}},
        {"a": {"type": "score", "criteria": ["b", ""]}},
        {"a": {"type": "score", "criteria": {"b": None}}},
        {"a": {"type": "noul", "criteria": {"maybe": "b"}}},
        {"a": {"type": "noul", "criteria": ["b"]}},
        {f"q{i}": {"type": "noul"} for i in range(10_000)},
        *NO_OBJECT,
    ),
    "chat_template_kwargs": ({"enable_thinking": True}, *NO_OBJECT),
    "priority": (2**40, *NO_COUNT),
    "cache_salt": ("a/b", *NO_TEXT),
    "timeout": (0, -1, *NO_NUMBER),
}


@cases(
    accepted(DECIDE, BODY, GOOD),
    refused(DECIDE, BODY, BAD),
    without(DECIDE, BODY, "state", "questions"),
)
def test_decisions_are_accepted_or_refused_with_their_field(case):
    run(case)


EMBED, RERANK, SCORE = "/v1/embeddings", "/v1/rerank", "/v1/score"
PAIR = {"query": "a", "documents": ["b", "c"]}
TEXTS = {"text_1": "a", "text_2": ["b", "c"]}


@cases(
    accepted(
        EMBED,
        {"input": "hi"},
        {
            "input": ("a", ["a", "b"], [5, 6], [[5], [6, 7]]),
            "encoding_format": ("float", "base64", None),
            "model": ("tiny", "alias", None),
        },
    ),
    refused(
        EMBED,
        {"input": "hi"},
        {
            "input": ([], 1, {}, True, [[]], ["a", 1], [9999]),
            "encoding_format": ("int9", *NO_TEXT),
            "dimensions": (0, -1, *NO_COUNT),
        },
    ),
    without(EMBED, {"input": "hi"}, "input"),
    accepted(RERANK, PAIR, {"top_n": (1, 2, 9), "return_documents": (True, False)}),
    refused(
        RERANK,
        PAIR,
        {
            "query": (1, [], True),
            "documents": ([], 1, [1]),
            "top_n": (-1, *NO_COUNT),
            "return_documents": NO_FLAG,
        },
    ),
    without(RERANK, PAIR, "query", "documents"),
    accepted(SCORE, TEXTS, {"text_1": ("a", ["a", "b"]), "text_2": (["a", "b"],)}),
    refused(SCORE, TEXTS, {"text_1": ([], 1, True), "text_2": ([], 1, True)}),
)
def test_vectors_are_accepted_or_refused_with_their_field(case):
    run(case, "last")


@cases(
    accepted("/tokenize", {"prompt": "hi"}, {"prompt": ("a", ""), "add_special_tokens": (True,)}),
    refused("/tokenize", {"prompt": "hi"}, {"prompt": NO_TEXT, "add_special_tokens": NO_FLAG}),
    accepted("/detokenize", {}, {"tokens": ([], [5, 6])}),
    refused("/detokenize", {}, {"tokens": ([-1], ["x"], "x", 1, {}, [1.5])}),
    without("/detokenize", {"tokens": [5]}, "tokens"),
)
def test_tokens_are_accepted_or_refused_with_their_field(case):
    run(case)


@pytest.mark.parametrize(
    ("path", "body", "pooling"),
    [
        (DECIDE, BODY, "none"),
        (EMBED, {"input": "hi"}, "last"),
        (RERANK, PAIR, "last"),
        (SCORE, TEXTS, "last"),
        ("/tokenize", {"prompt": "hi"}, "none"),
        ("/detokenize", {"tokens": [5]}, "none"),
    ],
)
def test_a_model_that_does_not_exist_is_404(path, body, pooling):
    response = server(pooling).post(path, model="nobody", **body)
    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found"


def test_a_question_that_occurs_twice_is_refused_with_any_number_in_another_field():
    twice = (
        b'{"state": "a", "questions": {"a": {"type": "noul"}, "a": {"type": "noul"}}, "priority": '
    )
    for number in (b"5}", b"5.0}"):
        response = server().raw(DECIDE, twice + number)
        assert response.status_code == 400
        assert "occurs twice" in error_of(response)["message"]
