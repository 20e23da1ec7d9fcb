"""Instruction-set levels as parameters of tests."""

import pytest

from cpuserve import _C

# What this CPU can run, lowest first.
LEVELS = _C.isa_levels()


def each_level(test):
    """Run `test` with `isa` set to each level of this build; skip levels that this CPU lacks."""
    return _levels()(test)


def each_level_of_vectors(test):
    """The same, for slow tests: level scalar, which takes ten times as long, is deep."""
    return _levels(scalar=[pytest.mark.deep])(test)


def each_level_and_threads(*counts):
    """Run `test` with `isa` and `threads`: each level of vectors with each of these counts.

    Level scalar, which is deep, has 3 threads alone: the executor divides work among threads by
    the sizes of tiles, whatever a kernel computes a tile with.
    """
    levels = _levels(scalar=[pytest.mark.deep]).args[1]
    return pytest.mark.parametrize(
        ("isa", "threads"),
        [
            pytest.param(
                *level.values, threads, marks=level.marks, id=f"{level.values[0]}-{threads}-threads"
            )
            for level in levels
            for threads in counts
            if threads == 3 or level.values != ("scalar",)
        ],
    )


def _levels(scalar=()):
    """Return the mark that sets `isa`; `scalar` are further marks of that level."""
    parameters = []
    for level in _C.compiled_isa_levels():
        reason = f"this CPU cannot run level {level}"
        marks = [pytest.mark.skipif(level not in LEVELS, reason=reason)]
        marks += scalar if level == "scalar" else ()
        parameters.append(pytest.param(level, marks=marks))
    return pytest.mark.parametrize("isa", parameters)
