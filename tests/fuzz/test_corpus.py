"""Loads every case of the fuzzers' corpus again (tests/fuzz/run.py)."""

from __future__ import annotations

import json
import random

import pytest

from tests.fuzz.edits import apply, draw
from tests.fuzz.run import CORPUS, kind_of
from tests.fuzz.targets import TARGETS, Bench
from tests.helpers.depth import deep_but


@pytest.fixture(scope="module", params=deep_but(["gguf"], TARGETS))
def bench(request, tmp_path_factory):
    return request.param, Bench(TARGETS[request.param], tmp_path_factory.mktemp("fuzz") / "files")


def test_cases_load_or_are_refused_in_one_line(bench, tmp_path):
    kind, files = bench
    corpus = json.loads((CORPUS / f"{kind}.json").read_text())
    assert len(corpus) >= 10
    assert files.outcome([], tmp_path / "work") == "loaded"
    outcomes = {
        kind_of(files.outcome([*map(tuple, e)], tmp_path / "work")) for e in corpus.values()
    }
    # Texts may change, so most kinds of outcome must still be told apart, not all.
    assert len(outcomes) >= len(corpus) // 2


def test_edits_replace_bytes_of_the_original():
    edits = [("a", 1, 3, "ff"), ("b", 0, 1, ""), ("a", 4, 4, "0000")]
    assert apply(edits, "a", b"\1\2\3\4\5") == b"\1\xff\4\0\0\5"


def test_the_same_seed_draws_the_same_case(bench):
    _, files = bench
    cases = [draw(random.Random(seed), files.files) for seed in range(200)]
    assert cases == [draw(random.Random(seed), files.files) for seed in range(200)]
    assert len({json.dumps(case) for case in cases}) > 150
