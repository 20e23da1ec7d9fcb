"""Upper bounds of token rates: the slower of reading and multiplying, by type of weights."""

import pytest

from cpuserve.platforms.limits import REQUESTS, Part, limits_by_type, rate_limit, told_limits

READS = 30e9
DOTS = {"f32": 200e9, "bf16": 200e9, "int8": 320e9, "int4": 600e9}


def test_few_requests_wait_for_memory_and_many_for_arithmetic():
    part = Part("bf16", 2e9, 1e9)
    one, many = rate_limit(1, [part], READS, DOTS), rate_limit(32, [part], READS, DOTS)
    assert (one.by, one.tokens_per_s) == ("memory", pytest.approx(15))
    assert (many.by, many.tokens_per_s) == ("arithmetic", pytest.approx(100))


def test_a_step_takes_the_slower_of_both_for_each_part():
    parts = [Part("bf16", 3e9, 0.1e9), Part("int4", 0.3e9, 3e9)]
    seconds = 3e9 / READS + 2 * 8 * 3e9 / DOTS["int4"]
    assert rate_limit(8, parts, READS, DOTS).tokens_per_s == pytest.approx(8 / seconds)


def test_more_requests_together_are_never_slower():
    for dot, limits in limits_by_type(READS, DOTS).items():
        assert tuple(limit.requests for limit in limits) == REQUESTS
        rates = [limit.tokens_per_s for limit in limits]
        assert rates == sorted(rates)
        assert rates[-1] == pytest.approx(DOTS[dot] / 2e9)


def test_the_text_marks_where_arithmetic_becomes_the_limit():
    told = told_limits(limits_by_type(READS, DOTS)["int8"])
    eight = "160 for 8 (by arithmetic from here on)"
    assert told == f"28 tokens/s for one request, 113 for 4, {eight}, 160 for 32"


def test_no_weights_have_no_limit():
    assert rate_limit(1, [], READS, DOTS).tokens_per_s == 0
