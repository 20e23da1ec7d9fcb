"""Records, percentiles and their comparison."""

import importlib.util
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuserve.bench.schema import Record, Where, percentile, record, table

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
HERE = Where(host="h", isa="avx2", threads=2, model="m")


def script(name):
    """A module of benchmarks/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_a_percentile_lies_between_the_extremes(values, percent):
    assert min(values) <= percentile(values, percent) <= max(values)


def test_percentiles_interpolate():
    assert [percentile([4, 1, 3, 2], p) for p in (0, 50, 100)] == [1, 2.5, 4]
    assert percentile([], 50) == 0.0


def test_the_fraction_is_the_median_of_the_pairs_not_the_ratio_of_medians():
    found = record("decode", "tokens/s", [10, 20, 30], HERE, roofs=[20, 20, 300], of="roof")
    assert (found.fraction, found.of, found.median) == (0.5, "roof", 20)
    assert msgspec.json.decode(found.to_json(), type=Record) == found
    assert found.commit


def test_a_roof_of_zero_is_no_roof():
    found = record("decode", "tokens/s", [10], HERE, roofs=[0.0], of="roof")
    assert (found.fraction, found.of) == (None, None)


def test_the_table_shows_the_share_of_the_roof():
    text = table([record("decode", "tokens/s", [10], HERE, roofs=[20], of="bandwidth")])
    assert "50.0 % of bandwidth" in text


def lines(tmp_path, name, **metrics):
    file = tmp_path / name
    file.write_text("\n".join(record(m, u, [v], HERE).to_json() for m, (u, v) in metrics.items()))
    return str(file)


@pytest.mark.parametrize(
    ("unit", "after", "code"),
    [("tokens/s", 95.0, 0), ("tokens/s", 90.0, 1), ("ms", 90.0, 0), ("ms", 120.0, 1)],
)
def test_compare_fails_on_what_got_worse(tmp_path, capsys, unit, after, code):
    before = lines(tmp_path, "before", speed=(unit, 100.0), gone=("ms", 1.0))
    later = lines(tmp_path, "after", speed=(unit, after))
    assert script("compare").main([before, later, "--threshold", "0.06"]) == code
    out = capsys.readouterr().out
    assert ("WORSE" in out) == bool(code)
    assert "only in before" in out


def test_compare_prefers_fractions_of_the_roof(tmp_path):
    gain = script("compare").gain
    slow = record("d", "tokens/s", [50], HERE, roofs=[100], of="r")
    drifted = record("d", "tokens/s", [40], HERE, roofs=[50], of="r")
    assert gain(slow, drifted) == pytest.approx(0.6)
