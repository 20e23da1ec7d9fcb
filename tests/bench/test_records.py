"""Records, percentiles and their comparison."""

import contextlib
import importlib.util
import math
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuserve.bench.results import latency_record
from cpuserve.bench.schema import Record, Where, percentile, table
from cpuserve.bench.schema import record as made

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
HERE = Where(host="h", isa="avx2", threads=2, model="m")


def record(metric, unit, samples, where, better="more", **more):
    return made(metric, unit, samples, where, better=better, **more)


def script(name):
    """Import a script of benchmarks/, which is not a package."""
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


def file_of(tmp_path, name, *records):
    file = tmp_path / name
    file.write_text("".join(r.to_json() + "\n" for r in records))
    return str(file)


def told(tmp_path, capsys, before, after, *more):
    """(exit code, stdout, stderr) of compare on two lists of records."""
    files = [file_of(tmp_path, "before", *before), file_of(tmp_path, "after", *after)]
    code = script("compare").main([*files, *more])
    return code, *capsys.readouterr()


@pytest.mark.parametrize(
    ("better", "after", "verdict"),
    [
        ("more", 95.0, "same"),
        ("more", 90.0, "WORSE"),
        ("more", 120.0, "better"),
        ("less", 90.0, "better"),
        ("less", 120.0, "WORSE"),
    ],
)
@pytest.mark.parametrize("unit", ["tokens/s", "ms", "us/layer", "us/token", "ratio", "x target"])
def test_compare_goes_by_the_direction_of_the_record(
    tmp_path, capsys, unit, better, after, verdict
):
    sides = [[record("speed", unit, [v], HERE, better)] for v in (100.0, after)]
    code, out, _ = told(tmp_path, capsys, *sides, "--threshold", "0.06")
    assert code == (verdict == "WORSE")
    assert verdict in out


@pytest.mark.parametrize(
    ("better", "before", "after", "change"),
    [
        ("less", 0, 900, -math.inf),
        ("more", 0, 900, math.inf),
        ("less", 900, 0, 1.0),
        ("more", 900, 0, -1.0),
        ("less", 0, 0, 0.0),
    ],
)
def test_from_nothing_to_something_is_a_change(tmp_path, capsys, better, before, after, change):
    sides = [record("step_allocations", "count", [v], HERE, better) for v in (before, after)]
    compare = script("compare")
    assert compare.gain(*compare.compared(*sides)) == change
    code, out, _ = told(tmp_path, capsys, sides[:1], sides[1:])
    assert (code, "WORSE" in out) == ((1, True) if change < 0 else (0, False))


def test_a_change_within_the_spread_is_noise(tmp_path, capsys):
    steady, noisy = [100.0] * 20, [*[90.0] * 17, *[101.0] * 3]
    sides = [[record("decode", "tokens/s", v, HERE)] for v in (steady, noisy)]
    code, out, _ = told(tmp_path, capsys, *sides)
    assert (code, "noise" in out) == (0, True)
    clear = [record("decode", "tokens/s", [90.0] * 20, HERE)]
    assert told(tmp_path, capsys, sides[0], clear)[0] == 1


def test_the_spread_of_shares_is_that_of_the_shares(tmp_path, capsys):
    # The machine drifts by 2 x within the run, but each round has its own roof.
    roofs = [100, 150, 200]
    before, after = (
        [record("d", "tokens/s", [share * r for r in roofs], HERE, roofs=roofs, of="r")]
        for share in (0.8, 0.7)
    )
    assert before[0].p5 < after[0].p95
    code, out, _ = told(tmp_path, capsys, before, after)
    assert (code, "WORSE" in out) == (1, True)


def test_compare_prefers_fractions_of_the_roof():
    compare = script("compare")
    slow = record("d", "tokens/s", [50], HERE, roofs=[100], of="r")
    drifted = record("d", "tokens/s", [40], HERE, roofs=[50], of="r")
    assert compare.gain(*compare.compared(slow, drifted)) == pytest.approx(0.6)


def test_latencies_of_two_runs_are_the_same_measurement(tmp_path, capsys):
    before, after = (
        latency_record("ttft", [v] * n, HERE, {"input_len": 6}) for v, n in ((10.0, 4), (20.0, 5))
    )
    assert (before.facts, before.parameters) == ({"values": 4, "p99": 10.0}, {"input_len": 6})
    code, out, _ = told(tmp_path, capsys, [before], [after])
    assert (code, "WORSE" in out, "only in" in out) == (1, True, False)


def test_compare_tells_what_it_did_not_use(tmp_path, capsys):
    one, two = (record("d", "tokens/s", [v], HERE) for v in (1, 2))
    before = file_of(tmp_path, "b", one, two)
    with Path(before).open("a") as file:
        file.write('{"metric": "d"}\n\nnoise\n')
    after = file_of(tmp_path, "a", two, record("other", "ms", [1], HERE, "less"))
    assert script("compare").main([before, after]) == 0
    out, err = capsys.readouterr()
    assert "only in after" in out
    assert [line.split(":")[1] for line in err.splitlines()] == ["2", "3", "5"]
    assert err.count("skipped") == 2
    assert "the earlier record is not used" in err


def test_compare_of_nothing_in_common_is_no_success(tmp_path, capsys):
    sides = [[record(name, "ms", [1], HERE, "less")] for name in ("a", "b")]
    code, _, err = told(tmp_path, capsys, *sides)
    assert (code, "no measurement is in both" in err) == (2, True)


def test_the_records_of_streams_beside_a_prompt_are_records(monkeypatch, capsys):
    bench = script("bench_itl")
    rounds = iter(
        [([6.0, 7.0], [9.0, 40.0], 3.0, 1.5, 96, 0), ([6.0, 6.0], [8.0, 30.0], 2.0, 1.0, 64, 20)]
    )

    async def learn(*_):
        pass

    monkeypatch.setattr(bench, "ServerProcess", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(bench, "learn", learn)
    monkeypatch.setattr(bench, "round_of", lambda *_: next(rounds))
    monkeypatch.setattr(sys, "argv", ["bench_itl.py", "m", "--rounds", "2"])
    assert bench.main() == 0
    found = [
        msgspec.json.decode(line, type=Record) for line in capsys.readouterr().out.splitlines()
    ]
    assert {r.metric for r in found} >= {"itl_p99", "itl_longest", "ttft_beside_streams"}
    assert {r.better for r in found} == {"less"}
    assert found[0].facts == {"chunks": [96, 64], "alone_s": [1.5, 1.0], "stolen_ms": [0, 20]}
    assert set(found[0].parameters) == {"streams", "prompt_tokens", "itl_target_ms"}


def test_latencies_of_requests_are_held_against_how_well_their_median_is_known(tmp_path, capsys):
    # Latencies differ by up to 4 x, as in a queue, but 200 samples give a precise median.
    ramp = [10.0 + 0.3 * i for i in range(200)]

    def latency(factor, count):
        values = sorted(factor * v for v in ramp)[:: 200 // count]
        return [latency_record("ttft", values, HERE, {})]

    code, out, _ = told(tmp_path, capsys, latency(1, 200), latency(2, 200))
    assert (code, "WORSE" in out) == (1, True)
    code, out, _ = told(tmp_path, capsys, latency(1, 8), latency(1.3, 8))
    assert (code, "noise" in out) == (0, True)


def test_the_table_says_what_records_of_one_metric_differ_in():
    shapes = [{"kernel": "norm", "batch": 1, "rows": 2}, {"kernel": "add", "batch": 8, "rows": 2}]
    several = [record("time", "us", [1.0], HERE, parameters=shape) for shape in shapes]
    lines = table(several).splitlines()
    assert ["norm, batch 1" in lines[1], "add, batch 8" in lines[2]] == [True, True]
    assert "rows" not in "".join(lines)
    alone = table([several[0], record("rate", "us", [1.0], HERE)])
    assert "norm" not in alone
    assert alone.splitlines()[0].split()[:2] == ["metric", "median"]
