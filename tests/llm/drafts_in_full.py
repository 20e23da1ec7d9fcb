"""Every drafter and none return the same tokens and logprobs for 200 requests of every kind.

    python -m pytest tests/llm/drafts_in_full.py [-k "mtp and alone"]

pytest does not find this file by itself, because it runs for many minutes. Fewer of the same
requests are in test_exact_drafts.py.
"""

from __future__ import annotations

import functools

import pytest

from tests.helpers.drafters import DRAFTED, drafter_for
from tests.helpers.every_kind import SITUATIONS, check_situation, wanted

COUNT = 200
ROWS = [(name, family) for name, families in DRAFTED.items() for family in families]


@pytest.fixture(scope="module")
def row(tmp_path_factory):
    """row(name, family) = a drafter, and the responses of its model without guesses."""

    @functools.cache
    def get(name, family):
        found = drafter_for(name, tmp_path_factory.mktemp(name), family)
        want = wanted(found, COUNT)
        assert str in {type(stop) for _, ends in want for *_, stop, _ in ends}  # a stop string
        return found, want

    return get


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize(("name", "family"), ROWS)
def test_responses_are_equal(hasty, patient_offload, row, tmp_path, name, family, situation):
    drafter, want = row(name, family)
    check_situation(situation, drafter, want, tmp_path, guesses=name != "none")
