"""Selection of the tests of a run: `pytest` alone leaves out tests that are marked `deep`.

A test marked `matrix` has one case for each combination of many parameters. Its cases are deep,
except a few that together contain every value of every parameter. `.ci/run` runs both parts.
"""

import os
from pathlib import Path

import pytest

# In these folders a test takes milliseconds: 3,218 tests take 73 s on one CPU.
QUICK = ("config", "platforms", "quant", "sampling", "serving", "tokenizer")
MOST_WORKERS = 8  # each imports torch, which takes up to a GB


def names_tests(config) -> bool:
    """Whether the command line names files or tests, not only directories."""
    return any("::" in name or Path(name).is_file() for name in config.args)


def workers(config) -> int:
    """Return the number of pytest-xdist workers: one for each CPU, 0 to run without xdist.

    Named files and tests run without it, so that `-s` and `--pdb` work.
    """
    if names_tests(config) or config.option.collectonly:
        return 0
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(cpus, MOST_WORKERS) if cpus > 1 else 0


def deep_but(kept, cases):
    """Return `cases` as parameters of a test: all that are not in `kept` are deep."""
    return [pytest.param(case, marks=() if case in kept else pytest.mark.deep) for case in cases]


def mark_matrices(items) -> None:
    """Mark the cases of matrix tests `deep`, except a few that contain every value."""
    cases = {}
    for item in items:
        if item.get_closest_marker("matrix") and hasattr(item, "callspec"):
            cases.setdefault((item.path, item.originalname), []).append(item)
    for group in cases.values():
        group = [item for item in group if not item.get_closest_marker("deep")]
        # Cases that this CPU skips test no values, so they are covered separately.
        for skips in (False, True):
            part = [item for item in group if skipped(item) == skips]
            kept = set(covering([values_of(item) for item in part]))
            for number, item in enumerate(part):
                if number not in kept:
                    item.add_marker(pytest.mark.deep)


def mark_quick(items) -> None:
    """Mark the tests in the folders of QUICK `quick`, except deep ones and those for a network."""
    for item in items:
        slow = item.get_closest_marker("network") or item.get_closest_marker("deep")
        if item.path.parent.name in QUICK and not slow:
            item.add_marker(pytest.mark.quick)


def is_not_read(path: Path, config) -> bool:
    """Whether `path` is a folder of tests without quick ones in a run of `pytest -m quick`."""
    of_tests = path.is_dir() and path.parent == Path(__file__).parents[1]
    return config.option.markexpr == "quick" and of_tests and path.name not in QUICK


def skipped(item) -> bool:
    """Whether a skipif mark of the test already has a condition that is true."""
    return any(True in mark.args for mark in item.iter_markers("skipif"))


def values_of(item) -> set[tuple[str, str]]:
    """Return the (name, value) pairs of the parameters of a test case."""
    return {(name, repr(value)) for name, value in item.callspec.params.items()}


def covering(cases):
    """Yield the indices of cases that together contain every value. A case is a set of values.

    Each time it takes the case with the most values that no case before it contains.
    """
    missing = [set(case) for case in cases]
    while any(missing):
        best = max(range(len(missing)), key=lambda number: len(missing[number]))
        yield best
        found = set(cases[best])
        for values in missing:
            values -= found


def leave_out_deep(config, items) -> None:
    """Deselect deep tests unless the command line names tests, words (-k) or marks (-m)."""
    if names_tests(config) or config.option.markexpr or config.option.keyword:
        return
    kept, deep = [], []
    for item in items:
        (deep if item.get_closest_marker("deep") else kept).append(item)
    config.hook.pytest_deselected(items=deep)
    items[:] = kept
