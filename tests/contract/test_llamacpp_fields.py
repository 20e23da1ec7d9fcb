"""Samplers, probabilities and mixed inputs on the routes of llama-server, as in its own tests."""

import pytest

from tests.contract.table import (
    NO_COUNT,
    NO_FLAG,
    NO_NUMBER,
    accepted,
    cases,
    refused,
    run,
    server,
    without,
)

COMPLETION, EMBEDDING, RERANK = "/completion", "/embedding", "/rerank"
BODY = {"prompt": "hi", "n_predict": 4}
RANKED = {"query": "a", "documents": ["a", "b", "c", "d"]}
GOOD = {
    "prompt": ("hi", [5, 6], ["a", "b"], ["a", [5, 6]], [5, "a", 6], {"prompt_string": "a"}),
    "n_predict": (-1, 0, 1, 100_000),
    "temperature": (-1, 0, 0.8, 2),
    "samplers": ([], ["top_k"], ["TOP-K", "temp"], ["unheard_of"], "edskypmxt", "", "?", None),
    "typical_p": (0, 0.5, 1),
    "min_keep": (0, 5),
    "top_n_sigma": (-1, 0, 1.5),
    "dynatemp_range": (0, 0.5),
    "dynatemp_exponent": (0.5, 2),
    "xtc_probability": (0, 0.5, 1),
    "xtc_threshold": (0.1, 0.6, 2),  # a threshold of 2 is not read while xtc is off
    "repeat_last_n": (-1, 0, 64),
    "dry_multiplier": (0, 0.8),
    "dry_base": (0, 1.75),
    "dry_sequence_breakers": ([], ["\n", "a"]),
    "no_repeat_ngram_size": (-1, 0, 1, 2**31 - 1),
    "ngram_size": (0, 1, 2**31 - 1),
    "window_size": (-1, 5),  # it is not read without ngram_size
    "whitelist_token_ids": ([], [5]),
    "mirostat": (0, 1, 2),
    "mirostat_tau": (5,),
    "mirostat_eta": (0.1,),
    "post_sampling_probs": (True, False),
    "n_probs": (0, 1, 20),
    "response_fields": ([], ["content", "generation_settings/n_predict"], [""]),
    "cache_prompt": (True, False),
    "id_slot": (-1, 0, 5),
}  # fmt: skip
BAD = {
    "prompt": ([], 1, None, True, [1, [2]]),
    "n_predict": NO_COUNT,
    "samplers": (1, [1], {}, True, ["top_k"] * 65),
    "typical_p": (-0.1, 1.1, *NO_NUMBER),
    "min_keep": (-1, *NO_COUNT),
    "top_n_sigma": (1e9, *NO_NUMBER),
    "dynatemp_range": (-1, *NO_NUMBER),
    "dynatemp_exponent": NO_NUMBER,
    "xtc_probability": (-0.1, 1.1, *NO_NUMBER),
    "xtc_threshold": NO_NUMBER,
    "repeat_last_n": (-2, *NO_COUNT),
    "dry_multiplier": (-1, *NO_NUMBER),
    "dry_base": NO_NUMBER,
    "dry_allowed_length": NO_COUNT,
    "dry_penalty_last_n": NO_COUNT,
    "dry_sequence_breakers": ("x", 1, [1], {}),
    "no_repeat_ngram_size": (-2, 2**31, *NO_COUNT),
    "ngram_size": (-1, 2**31, *NO_COUNT),
    "window_size": NO_COUNT,
    "whitelist_token_ids": ("x", 1, ["a"], {}),
    "mirostat": (-1, 3, *NO_COUNT),
    "mirostat_tau": NO_NUMBER,
    "mirostat_eta": NO_NUMBER,
    "post_sampling_probs": NO_FLAG,
    "n_probs": (21, *NO_COUNT),
    "tfs_z": (0.5,),
    "adaptive_target": (0.5,),
}
MIXED = (
    "string",
    [12, 34, 56],
    [12, 34, "string", 56, 78],
    ["string1", "string2"],
    ["string1", [12, 34, 56]],
    [[12, 34, 56], [12, "string", 34, 56]],
    {"prompt_string": "string"},
    ["string1", {"prompt_string": "string2"}],
)


@cases(
    accepted(COMPLETION, BODY, GOOD),
    refused(COMPLETION, BODY, BAD),
    refused(COMPLETION, {**BODY, "xtc_probability": 0.5}, {"xtc_threshold": (-1, 1.1)}),
    refused(COMPLETION, {**BODY, "mirostat": 2}, {"mirostat_tau": (-1,), "mirostat_eta": (-1,)}),
    refused(
        COMPLETION,
        {**BODY, "dry_multiplier": 0.8},
        {
            "dry_base": (0, 0.9),
            "dry_allowed_length": (-1,),
            "dry_penalty_last_n": (-2,),
            "dry_sequence_breakers": ([], [""], ["x" * 41], ["x"] * 65),
        },
    ),
    without(COMPLETION, BODY, "prompt"),
)
def test_completion(case):
    run(case)


@cases(
    accepted(EMBEDDING, {"input": "a"}, {"input": MIXED}),
    accepted(EMBEDDING, {"content": "a"}, {"content": MIXED}),
)
def test_inputs_of_embeddings_may_mix_texts_and_ids(case):
    run(case, "last")
    count = len(server("last").post(case.path, **case.body).json())
    several = isinstance(case.value, list) and not isinstance(case.value[0], int)
    assert count == (len(case.value) if several else 1)


@cases(
    accepted(RERANK, RANKED, {"top_n": (1, 2, 4, 99, None)}),
    refused(RERANK, RANKED, {"documents": ([], 123, [1, 2, 3]), "query": (1, [], True)}),
    without(RERANK, RANKED, "documents", "query"),
)
def test_rerank(case):
    run(case, "rank")
    if case.field == "top_n":
        results = server("rank").post(case.path, **case.body).json()["results"]
        assert len(results) == min(case.value or 4, 4)


@pytest.mark.parametrize("path", ["/embeddings", "/v1/embeddings"])
def test_a_reranker_has_no_embeddings(path):
    response = server("rank").post(path, input="hello")
    assert response.status_code == 400
    assert "rerank" in response.text


@pytest.mark.parametrize("action", ["save", "restore", "erase"])
def test_slots_have_no_files(action):
    response = server().post(f"/slots/0?action={action}", filename="a.bin")
    assert response.status_code in (400, 501)
    assert action in response.text
