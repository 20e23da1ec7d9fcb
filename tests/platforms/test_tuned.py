"""Work sizes that were tuned on this machine: the file, and who may use it."""

from __future__ import annotations

import pytest

from cpuserve.base.version import version
from cpuserve.platforms import tuned
from cpuserve.platforms.tuned import Tuned, read_tuned, store_tuned, tuned_notes

SIZES = {"strip_bytes": 128 << 10, "rows": 256}


def accept(sizes):
    """A check that finds no fault but negative sizes."""
    if any(n < 0 for n in sizes.values()):
        msg = "a size is negative"
        raise ValueError(msg)


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "new" / "work_sizes.json"
    monkeypatch.setattr(tuned, "tuned_file", lambda: path)
    return path


def test_no_file_is_nothing_to_say(file):
    assert read_tuned("A", accept) == Tuned()
    assert list(tuned_notes(Tuned(), "avx2")) == []


def test_what_is_stored_is_read_and_said_in_one_line(file):
    assert store_tuned("A", Tuned(), "avx2", SIZES) == file
    found = read_tuned("A", accept)
    assert found == Tuned({"avx2": SIZES})
    (line,) = tuned_notes(found, "avx2")
    assert "tuned on this machine: strip 128.00 KiB, rows 256" in line
    assert "\n" not in line
    assert list(tuned_notes(found, "avx512")) == []
    assert [p.name for p in file.parent.iterdir()] == [file.name]


def test_levels_are_kept_beside_each_other_and_can_be_forgotten(file):
    store_tuned("A", Tuned(), "avx2", SIZES)
    store_tuned("A", read_tuned("A", accept), "avx512", {"rows": 128})
    assert read_tuned("A", accept).levels == {"avx2": SIZES, "avx512": {"rows": 128}}
    store_tuned("A", read_tuned("A", accept), "avx2", {})
    assert read_tuned("A", accept).levels == {"avx512": {"rows": 128}}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff\x00",
        b"[]",
        b'{"cpuserve": 1, "cpu": "A", "levels": {}}',
        b'{"cpuserve": "1", "cpu": "A", "levels": {"avx2": {"rows": "many"}}}',
        b'{"cpuserve": "1", "cpu": "A", "levels": {"avx2": {"rows": -1}}}',
        b'{"cpuserve": "1", "cpu": "A", "levels": {}, "more": 1}',
    ],
)
def test_a_damaged_file_is_ignored_with_one_line(file, text):
    file.parent.mkdir()
    file.write_bytes(text)
    found = read_tuned("A", accept)
    assert not found.levels
    (line,) = tuned_notes(found, "avx2")
    assert "is ignored" in line
    assert "--tune" in line
    assert "\n" not in line


@pytest.mark.parametrize(("cpu", "made"), [("B", version()), ("A", "0.0.1")])
def test_a_file_of_another_cpu_or_version_is_ignored_with_one_line(file, monkeypatch, cpu, made):
    monkeypatch.setattr(tuned, "version", lambda: made)
    store_tuned(cpu, Tuned(), "avx2", SIZES)
    monkeypatch.setattr(tuned, "version", version)
    found = read_tuned("A", accept)
    assert not found.levels
    (line,) = tuned_notes(found, "avx2")
    assert f"was made by cpuserve {made} on {cpu}" in line


def test_a_folder_that_cannot_be_read_is_one_line(file):
    file.mkdir(parents=True)
    (line,) = tuned_notes(read_tuned("A", accept), "avx2")
    assert "is ignored" in line
