"""Draw the results of `cpuserve bench` on a terminal: tables with bars and distributions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpuserve.bench.results import latency_columns, latency_rows, summary_rows
from cpuserve.bench.schema import differing
from cpuserve.cli.drawing import bar, distribution, fitting_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, RenderableType

    from cpuserve.bench.results import Report
    from cpuserve.bench.schema import Record


def records_view(console: Console, records: Sequence[Record]) -> RenderableType:
    """Return a table of records; bars show rates as shares of their upper bound."""
    heads = ("METRIC", "OF", "MEDIAN", "UNIT", "P5 .. P95", "OF THE ROOF")
    rows = []
    for each, what in zip(records, differing(records), strict=True):
        share = "" if each.fraction is None else f"{bar(console, each.fraction)} of {each.of}"
        spread = f"{each.p5:g} .. {each.p95:g}"
        rows.append((each.metric, what, f"{each.median:g}", each.unit, spread, share))
    return fitting_table(console, heads, rows, left=("METRIC", "OF", "UNIT", "OF THE ROOF"))


def report_view(console: Console, report: Report) -> RenderableType:
    """Return a table with the rates of a run, and a table with its latency distributions."""
    from rich.console import Group
    from rich.table import Table

    # The texts of the second column wrap; the first column is never cut.
    rates = Table.grid("", "", padding=(0, 2, 0, 0))
    rates.columns[0].no_wrap = True
    for row in summary_rows(report):
        rates.add_row(*row)
    heads = ("LATENCY, ms", *latency_columns(report), "LEAST .. LARGEST")
    rows = []
    for name, shown, values in latency_rows(report):
        figures = [f"{value:.2f}" for value in shown]
        rows.append((name, *figures, distribution(console, values)))
    left = ("LATENCY, ms", "LEAST .. LARGEST")
    return Group(rates, "", fitting_table(console, heads, rows, left=left))
