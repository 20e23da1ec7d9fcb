"""Request: which logits it wants, and which token ends it."""

import math

import pytest

from cpuserve.core.request import Request
from cpuserve.core.step import LogitRow, RowResult
from cpuserve.sampling.params import SamplingParams
from cpuserve.sampling.structured import StructuredOutputs

YES = StructuredOutputs(choice=["yes"])


def make(prompt=(1, 2, 3, 4), max_tokens=5, eos=(9,), **params):
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    return Request(0, list(prompt), sampling, max_tokens, 0, frozenset(eos))


def test_append_ends_at_eos_at_a_stop_token_and_at_max_tokens():
    assert make().append(9) == "stop"
    assert make(stop_token_ids=[7]).append(7) == "stop"
    assert make(ignore_eos=True).append(9) is None
    assert make(ignore_eos=True, stop_token_ids=[9]).append(9) == "stop"
    assert make(max_tokens=1).append(5) == "length"
    assert make(max_tokens=1).append(9) == "stop"


def test_stop_token_among_the_first_min_tokens_does_not_end():
    # The sampler bans it there; it can still come when nothing else is allowed.
    request = make(min_tokens=2)
    assert [request.append(9) for _ in range(3)] == [None, None, "stop"]


def test_rows_of_a_plain_prompt_are_the_last_one_only():
    request = make(logprobs=2)
    assert request.rows(3) == []
    assert request.rows(4) == [LogitRow(3, -1, 2)]


def test_rows_of_a_scored_prompt_target_the_next_prompt_token():
    request = make(prompt_logprobs=1)
    assert request.rows(2) == [LogitRow(0, 2, 1), LogitRow(1, 3, 1)]
    request.num_computed = 2
    request.prompt_rows += [RowResult(2), RowResult(3)]
    assert request.rows(4) == [LogitRow(0, 4, 1), LogitRow(1, -1, -1)]


def test_rows_scored_before_a_preemption_are_not_asked_for_again():
    request = make(prompt_logprobs=1)
    request.prompt_rows += [RowResult(2), RowResult(3)]
    assert request.num_computed == 0
    assert request.rows(4) == [LogitRow(2, 4, 1), LogitRow(3, -1, -1)]


def test_request_without_output_wants_scores_but_no_sample():
    assert make(max_tokens=0).rows(4) == []
    assert [r.target for r in make(max_tokens=0, prompt_logprobs=0).rows(4)] == [2, 3, 4]


@pytest.mark.parametrize(
    ("params", "fields"),
    [
        ({}, []),
        ({"allowed_token_ids": [5]}, []),
        ({"min_tokens": 3}, []),
        ({"logit_bias": {5: -100.0}, "repetition_penalty": 1e6}, []),
        ({"structured_outputs": YES}, []),
        ({"allowed_token_ids": [9], "min_tokens": 3}, ["allowed_token_ids", "min_tokens"]),
        ({"allowed_token_ids": [5, 9], "min_tokens": 3}, []),
        ({"allowed_token_ids": [9, 5], "min_tokens": 3, "logit_bias": {5: -math.inf}},
         ["allowed_token_ids", "logit_bias", "min_tokens"]),
        ({"logit_bias": {5: -math.inf}}, ["logit_bias"]),
        ({"structured_outputs": YES, "allowed_token_ids": [5]},
         ["structured_outputs", "allowed_token_ids"]),
        ({"structured_outputs": YES, "min_tokens": 2}, ["structured_outputs", "min_tokens"]),
    ],
    ids=str,
)  # fmt: skip
def test_fields_that_can_exclude_every_token_are_known_by_name(params, fields):
    assert make(**params).excluding_fields == fields


def test_min_tokens_excludes_nothing_once_it_is_reached():
    request = make(allowed_token_ids=[9], min_tokens=1)
    request.append(5)
    assert request.excluding_fields == []
