"""The memory for states of recurrent layers: how many slots, for how many requests."""

import pytest

from cpuserve.base.errors import ConfigError, TooLittleMemory
from cpuserve.config.cache_groups import STATES_OF_ONE
from cpuserve.config.decisions import Ledger
from cpuserve.config.options import EngineOptions
from cpuserve.platforms.cache_groups import plan_states

MIB = 1 << 20


def plan(slot, free, seqs, **options):
    asked = EngineOptions(**options)
    return plan_states(asked, Ledger(asked, {}), slot, free, seqs)


def test_a_model_without_recurrent_layers_gets_no_slots():
    found = plan(0, 0, 16)
    assert (found.slots, found.bytes, found.max_num_seqs) == (0, 0, 16)


def test_small_states_have_slots_for_all_requests_and_two_snapshots_each():
    found = plan(MIB, 1 << 40, 16)
    assert found.slots == 16 * (STATES_OF_ONE + 2)
    assert found.bytes == found.slots * MIB
    assert found.max_num_seqs == 16


def test_as_many_requests_run_by_default_as_a_quarter_of_the_memory_has_states_for():
    found = plan(100 * MIB, 8000 * MIB, 256)
    assert found.slots == 20
    assert found.max_num_seqs == 20 // STATES_OF_ONE


def test_one_request_runs_if_its_states_fit_at_all():
    found = plan(100 * MIB, 500 * MIB, 256)
    assert (found.slots, found.max_num_seqs) == (STATES_OF_ONE, 1)


def test_too_little_memory_for_one_request_is_one_line():
    with pytest.raises(TooLittleMemory, match=r"layers of a request need .*, but .* are free"):
        plan(100 * MIB, 399 * MIB, 256)


def test_requested_requests_get_up_to_half_of_the_memory_or_are_refused():
    assert plan(100 * MIB, 8000 * MIB, 10, max_num_seqs=10).max_num_seqs == 10
    with pytest.raises(ConfigError, match=r"max_num_seqs=11.* give at most 10"):
        plan(100 * MIB, 8000 * MIB, 11, max_num_seqs=11)
