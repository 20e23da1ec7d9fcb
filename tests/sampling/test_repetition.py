"""repetition_detection: compared with a plain search for repeated patterns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuserve.base.errors import InvalidRequest
from cpuserve.sampling.params import SamplingParams
from cpuserve.sampling.repetition import RepetitionDetection


def repeats(output, least, most, count):
    """The reference: whether the end of `output` is a pattern, `count` times."""
    return any(
        len(output) >= size * count and output[-size * count :] == output[-size:] * count
        for size in range(max(1, least), most + 1)
    )


@given(
    prompt=st.lists(st.integers(0, 1), max_size=4),
    output=st.lists(st.integers(0, 1), min_size=1, max_size=12),
    least=st.integers(0, 3),
    more=st.integers(0, 3),
    count=st.integers(2, 4),
)
def test_finds_what_a_plain_search_finds(prompt, output, least, more, count):
    asked = RepetitionDetection(
        min_pattern_size=least, max_pattern_size=least + more, min_count=count
    )
    want = repeats(output, least, least + more, count)
    assert asked.finds([*prompt, *output], len(output)) == want


@pytest.mark.parametrize(
    "fields",
    [
        {"max_pattern_size": 2},
        {"max_pattern_size": 2, "min_count": 1},
        {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2},
        {"max_pattern_size": -1},
        {"max_pattern_size": 1025, "min_count": 2},
        {"max_pattern": 2},
        {"max_pattern_size": "2"},
        [],
        True,
    ],
)
def test_bad_values_are_refused_by_name(fields):
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(repetition_detection=fields)
    assert caught.value.role == "repetition_detection"
