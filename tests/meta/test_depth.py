"""What `pytest` alone leaves out is what `pytest -m deep` runs, and nothing is in neither."""

import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers.depth import QUICK, covering, is_not_read
from tests.helpers.small_suite import run_suite

SUITE = """
import pytest

def test_plain(): pass

@pytest.mark.deep
def test_long(): pass

@pytest.mark.matrix
@pytest.mark.parametrize("a", range(5))
@pytest.mark.parametrize("b", "xyz")
@pytest.mark.parametrize("c", [len, max])
def test_matrix(a, b, c): pass

@pytest.mark.matrix
@pytest.mark.parametrize("a", [1, pytest.param(2, marks=pytest.mark.deep)])
@pytest.mark.parametrize("b", "xy")
def test_partly(a, b): pass
"""


def collected(folder, *options):
    """Return the names of the tests that pytest selects in `folder`."""
    _, output = run_suite(folder, "-q", "--collect-only", *options)
    return re.findall(r"test_it\.py::(\S+)", output)


@pytest.mark.deep
def test_the_two_parts_of_the_suite_are_all_of_it(tmp_path):
    (tmp_path / "test_it.py").write_text(SUITE)
    alone, deep = collected(tmp_path), collected(tmp_path, "-m", "deep")
    everything = collected(tmp_path, "-m", "deep or not deep")
    assert len(everything) == 2 + 5 * 3 * 2 + 2 * 2
    assert sorted(alone + deep) == sorted(everything)
    assert "test_plain" in alone
    assert "test_long" in deep
    matrix, partly = ([name for name in alone if word in name] for word in ("matrix", "partly"))
    assert len(matrix) == 5, "five cases have all values of three parameters"
    assert sorted(partly) == ["test_partly[x-1]", "test_partly[y-1]"], "what is deep covers nothing"
    named = collected(tmp_path, str(tmp_path / "test_it.py"))
    assert sorted(set(named)) == sorted(everything), "who names a file means all of it"


@pytest.mark.parametrize("sizes", [(3,), (3, 4), (7, 2, 5), (1, 1), (4, 4, 4)])
def test_a_few_cases_have_every_value(sizes):
    cases = [set(enumerate(case)) for case in itertools.product(*map(range, sizes))]
    kept = list(covering(cases))
    assert set.union(*(cases[n] for n in kept)) == set.union(*cases)
    assert len(kept) == len(set(kept)) == max(sizes)


@pytest.mark.parametrize("asked", ["quick", "deep", ""])
def test_a_quick_run_reads_the_folders_of_quick_tests_only(asked):
    config = SimpleNamespace(option=SimpleNamespace(markexpr=asked))
    tests = Path(__file__).parents[1]
    read = {path.name for path in tests.iterdir() if not is_not_read(path, config)}
    folders = {path.name for path in tests.iterdir() if path.is_dir()}
    assert read & folders == ({*QUICK} if asked == "quick" else folders)
    assert not is_not_read(tests, config)
    assert not is_not_read(tests / "api" / "data", config)
