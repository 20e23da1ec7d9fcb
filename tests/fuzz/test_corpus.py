"""Tries every case of the fuzzers' corpus again (tests/fuzz/run.py)."""

from __future__ import annotations

import json

import pytest

from tests.fuzz import operations
from tests.fuzz.files import FILES, FileBench
from tests.fuzz.run import CORPUS, kind_of
from tests.fuzz.targets import TARGETS
from tests.helpers.depth import deep_but

INPUTS = [name for name in TARGETS if name not in FILES]


def corpus(name):
    """The cases of a target by their kinds of outcome."""
    path = CORPUS / f"{name}.json"
    assert path.exists(), f"python -m tests.fuzz.run {name} --seconds 60 --keep writes {path}"
    return json.loads(path.read_text())


@pytest.fixture(scope="module", params=deep_but(["gguf"], FILES))
def bench(request, tmp_path_factory):
    made = FileBench(FILES[request.param], tmp_path_factory.mktemp("fuzz") / "files")
    yield request.param, made
    made.close()


def test_cases_load_or_are_refused_in_one_line(bench):
    kind, files = bench
    cases = corpus(kind)
    assert len(cases) >= 10
    assert files.outcome([]) == "loaded"
    outcomes = {kind_of(files.outcome([*map(tuple, e)])) for e in cases.values()}
    # Texts may change, so most kinds of outcome must still be told apart, not all.
    assert len(outcomes) >= len(cases) // 2


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_of_the_corpus_are_no_faults(name, tmp_path):
    made, cases = TARGETS[name](tmp_path), corpus(name)
    try:
        outcomes = {kind_of(made.outcome(case)) for case in cases.values()}
    finally:
        made.close()
    assert len(outcomes) >= len(cases) // 2


def test_every_operation_belongs_to_a_target_and_has_seeds():
    for operation in operations.operations():
        assert operation.target in TARGETS
        if operation.path in operations._with_bodies():
            assert operations.seeds()[operation.path]
