"""Instruction-set levels as parameters of tests."""

import pytest

from cpuserve import _C

# What this CPU can run, lowest first.
LEVELS = _C.isa_levels()


def each_level(test):
    """Run `test` with `isa` set to each level of this build; skip levels that this CPU lacks."""
    parameters = []
    for level in _C.compiled_isa_levels():
        reason = f"this CPU cannot run level {level}"
        skip = pytest.mark.skipif(level not in LEVELS, reason=reason)
        parameters.append(pytest.param(level, marks=skip))
    return pytest.mark.parametrize("isa", parameters)(test)
