"""Limits of requests: which are refused before they run, and how many tokens others may have."""

import math

import pytest

from cpuserve.base.errors import InvalidRequest
from cpuserve.core.admission import Limits, check_request, output_limit
from cpuserve.sampling.params import SamplingParams

LIMITS = Limits(max_model_len=100, kv_tokens=64, vocab=50)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "ok"),
    [
        (64, 0, True),
        (65, 0, False),
        (64, 1, True),
        (64, 2, False),
        (10, 55, True),
        (10, 56, False),
        (64, None, True),
        (65, None, False),
        (99, 1, False),
        (100, 0, False),
    ],
)
def test_request_that_alone_does_not_fit_is_refused(num_prompt, max_tokens, ok):
    params = SamplingParams(max_tokens=max_tokens)
    if ok:
        check_request([1] * num_prompt, params, LIMITS)
        assert output_limit(num_prompt, params, LIMITS) >= (max_tokens != 0)
    else:
        with pytest.raises(InvalidRequest):
            check_request([1] * num_prompt, params, LIMITS)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "limit"), [(10, 5, 5), (10, None, 55), (10, 0, 0), (60, None, 5)]
)
def test_output_limit_is_cut_to_context_and_cache(num_prompt, max_tokens, limit):
    assert output_limit(num_prompt, SamplingParams(max_tokens=max_tokens), LIMITS) == limit


def test_wish_for_more_tokens_than_the_context_holds_is_cut_to_the_context_first():
    """So it is the context that has to fit the KV cache, not max_tokens."""
    for kv_tokens, fits in [(99, True), (98, False)]:
        limits = Limits(max_model_len=100, kv_tokens=kv_tokens, vocab=50)
        if fits:
            check_request([1] * 10, SamplingParams(max_tokens=500), limits)
        else:
            with pytest.raises(InvalidRequest, match="whole cache holds 98"):
                check_request([1] * 10, SamplingParams(max_tokens=500), limits)


def test_full_context_may_be_scored_but_not_continued():
    limits = Limits(max_model_len=100, kv_tokens=1000, vocab=50)
    check_request([1] * 100, SamplingParams(max_tokens=0), limits)
    check_request([1] * 99, SamplingParams(max_tokens=500), limits)
    assert output_limit(99, SamplingParams(max_tokens=500), limits) == 1
    with pytest.raises(InvalidRequest, match="context length"):
        check_request([1] * 100, SamplingParams(max_tokens=1), limits)


NO_CHOICE = [
    {"allowed_token_ids": [7], "min_tokens": 1},
    {"allowed_token_ids": [7, 8], "stop_token_ids": [8], "min_tokens": 1},
    {"allowed_token_ids": [7, 9], "min_tokens": 1, "logit_bias": {9: -math.inf}},
    {"allowed_token_ids": [9], "logit_bias": {9: -math.inf}},
    {"allowed_token_ids": [8], "stop_token_ids": [8], "min_tokens": 1, "ignore_eos": True},
]


@pytest.mark.parametrize("params", NO_CHOICE, ids=str)
def test_request_whose_fields_exclude_every_token_is_refused_before_it_runs(params):
    limits = Limits(max_model_len=100, kv_tokens=64, vocab=50, eos_ids=frozenset({7}))
    with pytest.raises(InvalidRequest, match=r"excludes? every token") as caught:
        check_request([1], SamplingParams(**params), limits)
    assert caught.value.param == "allowed_token_ids"
    for name in ("min_tokens", "logit_bias"):
        assert (name in str(caught.value)) == (name in params)


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": [7]},
        {"allowed_token_ids": [7, 8], "min_tokens": 1},
        {"allowed_token_ids": [7], "min_tokens": 1, "ignore_eos": True},
        {"allowed_token_ids": [7], "max_tokens": 0, "prompt_logprobs": 0},
        {"min_tokens": 1, "logit_bias": {9: -math.inf}},
    ],
    ids=str,
)
def test_request_whose_fields_leave_a_token_is_not_refused(params):
    limits = Limits(max_model_len=100, kv_tokens=64, vocab=50, eos_ids=frozenset({7}))
    check_request([1], SamplingParams(**params), limits)
