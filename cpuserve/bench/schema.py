"""Records of measurements; a file of records has one JSON object per line."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from cpuserve.base.version import version
from cpuserve.config.values import aligned, markdown_table

Better = Literal["more", "less"]


class Record(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A measured metric, the machine and software, and its share of the machine's limit.

    better: whether "more" or "less" is an improvement.
    samples: one value per round, in `unit`.
    of: the name of the upper bound that the machine sets, which is probed in the same minute;
      None = the metric has no upper bound.
    fraction: the median over the rounds of measured / upper bound.
      fraction_p5 and fraction_p95 are its spread, and a larger fraction is always an improvement.
    parameters: the settings of the measurement;
      records with equal metric, model and parameters can be compared.
    facts: additional figures.
    """

    metric: str
    unit: str
    better: Better
    samples: list[float]
    median: float
    p5: float
    p95: float
    fraction: float | None = None
    fraction_p5: float | None = None
    fraction_p95: float | None = None
    of: str | None = None
    host: str = ""
    isa: str = ""
    threads: int = 0
    commit: str = ""
    model: str = ""
    parameters: dict[str, float | str] = {}
    facts: dict[str, float | str | list[float]] = {}

    def to_json(self) -> str:
        """Return the record as one line of JSON."""
        return msgspec.json.encode(self).decode()


class Where(msgspec.Struct, frozen=True, kw_only=True):
    """The members of a record that describe the machine and the model."""

    host: str
    isa: str
    threads: int
    model: str = ""


def record(
    metric: str,
    unit: str,
    samples: Sequence[float],
    where: Where,
    *,
    better: Better,
    roofs: Sequence[float] = (),
    of: str | None = None,
    parameters: Mapping[str, float | str] | None = None,
    facts: Mapping[str, float | str | list[float]] | None = None,
) -> Record:
    """Return a record of `samples`; roofs[i] is the upper bound of the machine in round i."""
    shares = [s / r for s, r in zip(samples, roofs, strict=False) if r > 0]
    return Record(
        metric=metric,
        unit=unit,
        better=better,
        samples=[rounded(s) for s in samples],
        median=rounded(percentile(samples, 50)),
        p5=rounded(percentile(samples, 5)),
        p95=rounded(percentile(samples, 95)),
        fraction=rounded(percentile(shares, 50)) if shares else None,
        fraction_p5=rounded(percentile(shares, 5)) if shares else None,
        fraction_p95=rounded(percentile(shares, 95)) if shares else None,
        of=of if shares else None,
        host=where.host,
        isa=where.isa,
        threads=where.threads,
        commit=commit(),
        model=where.model,
        parameters=dict(parameters or {}),
        facts=dict(facts or {}),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile, interpolated linearly between the two nearest values; 0 if empty."""
    if not values:
        return 0.0
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def rounded(value: float) -> float:
    """Return `value` rounded to five significant digits, because further digits are noise."""
    return float(f"{value:.5g}")


@cache
def commit() -> str:
    """Return the commit of the checkout ("+" = modified files), or the installed version."""
    here = str(Path(__file__).parent)
    try:
        describe = ["git", "-C", here, "describe", "--always", "--exclude=*", "--dirty=+"]
        out = subprocess.run(describe, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return version()
    return out.stdout.strip() or version()


def _told(name: str, value: float | str) -> str:
    return value if isinstance(value, str) else f"{name} {value:g}"


def differing(records: Sequence[Record]) -> list[str]:
    """Return a text per record with the parameters that differ between records of its metric."""
    seen: dict[tuple[str, str], set[str]] = {}
    for r in records:
        for name, value in r.parameters.items():
            seen.setdefault((r.metric, name), set()).add(str(value))
    return [
        ", ".join(_told(n, r.parameters[n]) for n in r.parameters if len(seen[r.metric, n]) > 1)
        for r in records
    ]


def told_record(r: Record) -> str:
    """Return a record as one line: metric, parameters, median, unit and share of the limit."""
    what = ", ".join(_told(name, value) for name, value in r.parameters.items())
    share = "" if r.fraction is None else f", {100 * r.fraction:.0f} % of {r.of}"
    return f"{r.metric} ({what}): {r.median:g} {r.unit}{share}"


def told(where: Where) -> str:
    """Return the model and the machine of a measurement as text."""
    threads = f"{where.threads} thread{'' if where.threads == 1 else 's'}"
    shown = (where.model, where.isa, threads, f"cpuserve {version()}")
    return ", ".join(filter(None, shown))


def markdown(records: Sequence[Record]) -> str:
    """Return the records as a Markdown table with the model and the machine before it."""
    if not records:
        return ""
    first = records[0]
    where = Where(host=first.host, isa=first.isa, threads=first.threads, model=first.model)
    rows = [("", "median", "p5", "p95", "of the roof")]
    for r, what in zip(records, differing(records), strict=True):
        share = "" if r.fraction is None else f"{100 * r.fraction:.0f} %"
        name = f"{r.metric} ({what})" if what else r.metric
        rows.append((f"{name}, {r.unit}", f"{r.median:.4g}", f"{r.p5:.4g}", f"{r.p95:.4g}", share))
    return "\n".join([told(where), "", *markdown_table(rows)])


def table(records: Sequence[Record]) -> str:
    """Return the records as a text table: metric, parameters, median, spread, share of the limit.

    Only parameters that differ between records of the same metric are shown.
    """
    rows: list[tuple[str, ...]] = [("metric", "of", "median", "p5 .. p95", "unit", "of the roof")]
    for r, what in zip(records, differing(records), strict=True):
        share = "" if r.fraction is None else f"{100 * r.fraction:.1f} % of {r.of}"
        rows.append((r.metric, what, f"{r.median:g}", f"{r.p5:g} .. {r.p95:g}", r.unit, share))
    if not any(row[1] for row in rows[1:]):
        rows = [(row[0], *row[2:]) for row in rows]
    return "\n".join(aligned(rows))
