"""The roofline probe on this machine, with little memory and time."""

import os

import pytest

from cpuserve import _C
from cpuserve.platforms.probe import Roofline, thread_gain

LEVEL = _C.isa_levels()[-1]
CPU = min(os.sched_getaffinity(0))


def test_the_probe_measures_what_the_engine_would():
    probe = Roofline(_C, LEVEL, 1, [[CPU]], 1 << 20)
    found = probe.measure(0.01)
    assert found["read_bytes_per_s"] > 0
    assert set(found["dot_ops_per_s"]) == {"f32", "bf16", "int8", "int4"}
    assert found["barrier_s"] >= 0


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this test needs two CPUs")
def test_the_gain_of_a_thread_is_a_ratio_and_measured_once():
    gain = thread_gain(_C, LEVEL, 1)
    assert 0 < gain < 20
    assert thread_gain(_C, LEVEL, 1) == gain
