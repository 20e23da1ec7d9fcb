"""Processes are killed at random moments under load: others' streams go on, and nothing is left."""

import pytest

from tests.api.kills import KINDS, run


@pytest.mark.deep
@pytest.mark.parametrize("seed", [1])
def test_kills_at_random_moments_cost_only_the_streams_of_the_process(seed, tmp_path):
    found = run(tmp_path, kills=len(KINDS) + 1, seed=seed)
    assert found.kills
    assert not found.faults, found.report()
