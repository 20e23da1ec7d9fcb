"""Drawn results of `cpuserve bench`, and plain ones when no terminal reads them."""

import argparse
import io
import json
import re

import pytest
from rich.console import Console

from cpuserve.bench.driver import Timing
from cpuserve.bench.results import Report
from cpuserve.bench.schema import Where, record
from cpuserve.bench.traffic import Pace, Run
from cpuserve.cli import bench
from cpuserve.cli.bench_drawing import report_view
from cpuserve.cli.drawing import bar, distribution

HERE = Where(host="h", isa="avx2", threads=2, model="m")
RECORDS = [
    record("decode", "tokens/s", [10.0], HERE, better="more", roofs=[20.0], of="bandwidth",
           parameters={"batch": batch})
    for batch in (1, 8)
]  # fmt: skip


def console(encoding="utf-8"):
    return Console(file=io.TextIOWrapper(io.BytesIO(), encoding=encoding), width=120)


def test_a_bar_is_full_at_the_roof_and_above():
    assert bar(console(), 0.5) == "█████░░░░░  50 %"
    assert bar(console(), 1.3).startswith("██████████ ")
    assert bar(console("ascii"), 0.5) == "#####-----  50 %"


def test_a_distribution_shows_where_the_values_are():
    drawn = distribution(console(), [1.0] * 8 + [1.5] + [3.0] * 4)
    assert len(drawn) == 24
    assert drawn[0] == "█"
    assert drawn[-1] == "▅"
    assert drawn[6] != " "
    assert drawn[10:20].isspace()
    assert distribution(console(), [2.0, 2.0]) == "█"


@pytest.fixture
def terminal(monkeypatch):
    """A terminal without colours, and wide enough for every row."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "140")


def test_records_on_a_terminal_have_bars_and_no_colours(capsys, terminal):
    assert bench.show(RECORDS, argparse.Namespace(json=False)) == 0
    text = capsys.readouterr().out
    assert text.count("█████░░░░░  50 % of bandwidth") == 2
    assert "batch 1" in text
    assert not re.search(r"\x1b\[[\d;]*3\d", text)


def test_json_stays_json_on_a_terminal(capsys, terminal):
    bench.show(RECORDS, argparse.Namespace(json=True))
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["metric"] for line in lines] == ["decode", "decode"]


def test_a_pipe_gets_the_plain_table(capsys, monkeypatch):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    bench.show(RECORDS, argparse.Namespace(json=False))
    text = capsys.readouterr().out
    assert "50.0 % of bandwidth" in text
    assert "█" not in text


def test_a_report_shows_the_distribution_of_each_latency():
    timings = [Timing(0.0, [first, first + 1.0], [1, 1]) for first in (0.1, 0.1, 0.1, 0.9)]
    shown = console()
    shown.print(report_view(shown, Report(Run(timings, wall_s=2.0), HERE, Pace())))
    shown.file.seek(0)
    lines = shown.file.read().splitlines()
    assert any("4 completed, 0 failed" in line for line in lines)
    first = next(line for line in lines if "100.00" in line)
    assert "█" in first
    assert first.rstrip().endswith("▃")
