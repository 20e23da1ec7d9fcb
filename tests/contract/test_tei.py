"""The contract of the endpoints of text-embeddings-inference (TEI)."""

import pytest

from tests.contract.table import (
    NO_COUNT,
    NO_FLAG,
    NO_LIST,
    NO_NUMBER,
    NO_TEXT,
    accepted,
    cases,
    refused,
    run,
    server,
    without,
)

EMBED, EMBED_ALL, PREDICT, SIMILARITY = "/embed", "/embed_all", "/predict", "/similarity"
HI = {"inputs": "hi"}
SENTENCES = {"inputs": {"source_sentence": "a", "sentences": ["b", "c"]}}
CUT_GOOD = {
    "truncate": (True, False, None),
    "truncation_direction": ("left", "right", "Left", "Right", None),
    "model": ("tiny", "alias", None),
    "priority": (0, 5, None),
    "timeout": (1, 2.5, None),
}
CUT_BAD = {
    "truncate": NO_FLAG,
    "truncation_direction": ("up", *NO_TEXT),
    "priority": (2**40, *NO_COUNT),
    "timeout": (0, -1, *NO_NUMBER),
}
INPUTS = {
    "inputs": ("a", ["a", "b"], [5, 6], [[5], [6, 7]]),
    "prompt_name": (None,),
    "encoding_format": (None, "float"),
}
NO_INPUTS = {
    "inputs": ("", [], [""], 1, {}, True, [[]], ["a", 1], [9999], ["a"] * 1025),
    "prompt_name": ("query", *NO_TEXT),
    "encoding_format": ("base64", 1),
}


@cases(
    accepted(
        EMBED, HI, {**INPUTS, **CUT_GOOD, "normalize": (True, False), "dimensions": (1, 4, None)}
    ),
    refused(
        EMBED,
        HI,
        {**NO_INPUTS, **CUT_BAD, "normalize": NO_FLAG, "dimensions": (0, 5, *NO_COUNT)},
    ),
    without(EMBED, HI, "inputs"),
    accepted(EMBED_ALL, HI, {**INPUTS, **CUT_GOOD}),
    refused(EMBED_ALL, HI, {**NO_INPUTS, **CUT_BAD}),
    without(EMBED_ALL, HI, "inputs"),
    accepted(
        SIMILARITY,
        SENTENCES,
        {
            "inputs.sentences": (["a"], ["a"] * 9),
            "parameters": (None, {}),
            "parameters.truncate": (True, False, None),
            "parameters.truncation_direction": ("left", "Right"),
        },
    ),
    refused(
        SIMILARITY,
        SENTENCES,
        {
            "inputs.source_sentence": NO_TEXT,
            "inputs.sentences": ([], [1], ["a"] * 1025, *NO_LIST),
            "parameters.truncate": NO_FLAG,
            "parameters.truncation_direction": ("up", *NO_TEXT),
            "parameters.prompt_name": ("query", *NO_TEXT),
        },
    ),
)
def test_texts_to_embed_are_accepted_or_refused_with_their_field(case):
    run(case, "mean")


@cases(
    accepted("/embed_sparse", HI, {**INPUTS, **CUT_GOOD}),
    refused("/embed_sparse", HI, {**NO_INPUTS, **CUT_BAD}),
    without("/embed_sparse", HI, "inputs"),
)
def test_texts_for_sparse_embeddings_are_accepted_or_refused_with_their_field(case):
    run(case, "sparse")


@cases(
    accepted(
        PREDICT,
        HI,
        {
            "inputs": ("a", ["a"], ["a", "b"], [["a"], ["b", "c"]]),
            **CUT_GOOD,
            "raw_scores": (True, False, None),
            "parameters": (None, {}, {"top_k": 1}, {"function_to_apply": "sigmoid"}),
        },
    ),
    refused(
        PREDICT,
        HI,
        {
            "inputs": ("", [], [""], ["a", "b", "c"], [[]], [["a"], "b"], ["a", ["b"]], 1, [1]),
            **CUT_BAD,
            "raw_scores": NO_FLAG,
            "parameters.top_k": (0, -1, *NO_COUNT),
            "parameters.function_to_apply": ("tanh", *NO_TEXT),
        },
    ),
    without(PREDICT, HI, "inputs"),
)
def test_texts_to_label_are_accepted_or_refused_with_their_field(case):
    run(case, "classify")


@cases(
    accepted("/decode", {}, {"ids": ([5], [5, 6], [[5], [6, 7]])}),
    accepted("/decode", {"ids": [5]}, {"skip_special_tokens": (True, False, None)}),
    refused("/decode", {}, {"ids": ([], [-1], [10**6], ["x"], [1.5], [1, [2]], *NO_LIST)}),
    refused("/decode", {"ids": [5]}, {"skip_special_tokens": NO_FLAG}),
    without("/decode", {"ids": [5]}, "ids"),
)
def test_token_ids_are_accepted_or_refused_with_their_field(case):
    run(case)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/rerank", {"query": "a", "texts": []}, 400),
        ("/rerank", {"query": "", "texts": ["a"]}, 400),
        ("/rerank", {"query": 1, "texts": ["a"]}, 422),
        ("/rerank", {"query": "a", "texts": [1]}, 422),
        ("/rerank", {"query": "a", "texts": ["a"] * 1025}, 413),
        ("/rerank", {"query": "a", "texts": ["a"], "raw_scores": 1}, 422),
        ("/rerank", {"query": "a", "texts": ["a"], "return_text": 1}, 422),
        ("/tokenize", {"inputs": 1}, 422),
        ("/tokenize", {"inputs": "a", "add_special_tokens": 1}, 422),
        ("/tokenize", {"inputs": "a", "prompt_name": "query"}, 422),
        ("/", {"inputs": 1}, 422),
        ("/invocations", {"inputs": 1}, 422),
    ],
)
def test_on_a_path_that_others_share_a_body_of_tei_gets_errors_of_tei(path, body, status):
    response = server("mean").post(path, **body)
    assert response.status_code == status, response.text
    assert response.json().keys() == {"error", "error_type"}


@pytest.mark.parametrize("path", ["/rerank", "/tokenize", "/"])
def test_on_a_path_that_others_share_other_bodies_get_errors_of_openai(path):
    response = server("mean").post(path, more=1)
    assert response.status_code == 400
    assert response.json()["error"].keys() == {"message", "type", "param", "code"}
