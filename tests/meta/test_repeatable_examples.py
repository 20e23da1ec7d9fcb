"""The examples of hypothesis are the same in every run, whatever has run before in a process."""

import importlib

from hypothesis import given, settings
from hypothesis import strategies as st

CONSTANTS = "A = {}\nB = {}\n"


def examples():
    """Return the examples of a test, which hypothesis draws anew each time."""
    found = []

    @settings(max_examples=200, database=None)
    @given(st.integers(), st.text())
    def test(number, text):
        found.append((number, text))

    test()
    return found


def test_a_module_that_was_imported_changes_no_example(tmp_path, monkeypatch):
    folder = tmp_path / "sources"  # hypothesis passes over folders with the name `tests`
    folder.mkdir()
    numbers, texts = list(range(70_000, 70_400)), [f"text {i}" for i in range(400)]
    (folder / "with_many_constants.py").write_text(CONSTANTS.format(numbers, texts))
    before = examples()
    monkeypatch.syspath_prepend(folder)
    importlib.import_module("with_many_constants")
    assert examples() == before
    assert len({number for number, _ in before}) > 50
