"""Tries every case of the fuzzers' corpus again (tests/fuzz/run.py)."""

from __future__ import annotations

import json
import random

import pytest

from tests.fuzz import operations
from tests.fuzz.edits import apply, draw
from tests.fuzz.files import FILES, FileBench
from tests.fuzz.run import CORPUS, kind_of, tried
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


class Greedy:
    """A bench whose cases take some CPU time."""

    def __init__(self, most_bytes, most_cpu_s):
        self.most_bytes, self.most_cpu_s = most_bytes, most_cpu_s

    def outcome(self, case):
        return str(sum(range(case)))


def test_a_case_that_takes_too_much_is_a_finding():
    assert tried(Greedy(1 << 50, 1e9), 10) == "45"
    with pytest.raises(AssertionError, match="s of CPU time"):
        tried(Greedy(1 << 50, 0.0), 1_000_000)
    with pytest.raises(AssertionError, match="bytes of memory"):
        tried(Greedy(1, 1e9), 10)


def test_edits_replace_bytes_of_the_original():
    edits = [("a", 1, 3, "ff"), ("b", 0, 1, ""), ("a", 4, 4, "0000")]
    assert apply(edits, "a", b"\1\2\3\4\5") == b"\1\xff\4\0\0\5"


def test_the_same_seed_draws_the_same_case(bench):
    _, files = bench
    cases = [draw(random.Random(seed), files.files) for seed in range(200)]
    assert cases == [draw(random.Random(seed), files.files) for seed in range(200)]
    assert len({json.dumps(case) for case in cases}) > 150


@pytest.mark.parametrize("name", ["http-openai-chat", "templates", "frames"])
def test_the_same_seed_draws_the_same_input(name, tmp_path):
    made = TARGETS[name](tmp_path)
    try:
        cases = [made.draw(random.Random(seed)) for seed in range(50)]
        assert cases == [made.draw(random.Random(seed)) for seed in range(50)]
    finally:
        made.close()
    assert len({json.dumps(case) for case in cases}) > 40
