"""Draw the results of `cpuserve bench` on a terminal: tables with bars and distributions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpuserve.bench.results import latency_columns, latency_rows, summary_rows
from cpuserve.bench.schema import differing
from cpuserve.cli.drawing import bar, distribution, plain_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, RenderableType

    from cpuserve.bench.results import Report
    from cpuserve.bench.schema import Record


def records_view(console: Console, records: Sequence[Record]) -> RenderableType:
    """Return a table of records; bars show rates as shares of their upper bound."""
    heads = ("METRIC", "OF", "MEDIAN", "UNIT", "P5 .. P95", "OF THE ROOF")
    table = plain_table(heads, left=("METRIC", "OF", "UNIT", "OF THE ROOF"))
    for each, what in zip(records, differing(records), strict=True):
        share = "" if each.fraction is None else f"{bar(console, each.fraction)} of {each.of}"
        spread = f"{each.p5:g} .. {each.p95:g}"
        table.add_row(each.metric, what, f"{each.median:g}", each.unit, spread, share)
    return table


def report_view(console: Console, report: Report) -> RenderableType:
    """Return a table with the rates of a run, and a table with its latency distributions."""
    from rich.console import Group

    rates = plain_table(("RUN", ""), left=("RUN", ""))
    for row in summary_rows(report):
        rates.add_row(*row)
    heads = ("LATENCY, ms", *latency_columns(report), "LEAST .. LARGEST")
    table = plain_table(heads, left=("LATENCY, ms", "LEAST .. LARGEST"))
    for name, shown, values in latency_rows(report):
        figures = [f"{value:.2f}" for value in shown]
        table.add_row(name, *figures, distribution(console, values))
    return Group(rates, "", table)
