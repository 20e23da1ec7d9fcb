"""Results of a load run: records, the result file of vLLM, and a report for the terminal."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from cpuserve.base.errors import ConfigError
from cpuserve.bench.driver import Timing
from cpuserve.bench.observe import weight_reading
from cpuserve.bench.schema import Better, Record, Where, percentile, record, told
from cpuserve.bench.traffic import Pace, Run
from cpuserve.config.values import markdown_table

METRICS = ("ttft", "tpot", "itl", "e2el")
NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}
MOST_SAMPLES = 101  # a record of a latency with more samples has only percentiles 0 to 100
# The rates that `markdown` has.
_PASTED = ("requests", "prompt", "output", "total")
ROOF = "read bandwidth (weights read in the run, probe at the server's start)"


class Rate(NamedTuple):
    """A figure about a whole run, such as its output rate."""

    unit: str
    value: float
    better: Better = "more"


@dataclass(frozen=True, slots=True)
class Report:
    """A run and the settings of its report. goodput: latency limits in ms, by metric."""

    run: Run
    where: Where
    pace: Pace
    parameters: Mapping[str, float | str] = field(default_factory=dict)
    goodput: Mapping[str, float] = field(default_factory=dict)
    percentiles: Sequence[float] = (50.0, 95.0, 99.0)
    metrics: Sequence[str] = METRICS

    def latency(self, metric: str) -> list[float]:
        """Return all values of the latency `metric`, in milliseconds."""
        return milliseconds(self.run.timings, metric)

    def rates(self) -> dict[str, Rate]:
        """Return the figures about the whole run by name, such as the output rate."""
        run, wall = self.run, self.run.wall_s or math.inf
        prompts = sum(t.prompt_tokens for t in run.timings)
        cached = sum(t.cached_tokens for t in run.timings)
        driver_us = 1e6 * run.cpu_s / run.tokens if run.tokens else 0.0
        found = {
            "output": Rate("tokens/s", run.tokens / wall),
            "prompt": Rate("tokens/s", prompts / wall),
            "total": Rate("tokens/s", (run.tokens + prompts) / wall),
            "requests": Rate("requests/s", len(run.timings) / wall),
            "cached_prompt": Rate("share", cached / prompts if prompts else 0.0),
            "failed": Rate("count", float(len(run.errors)), "less"),
            "driver_cpu": Rate("us/token", driver_us, "less"),
        }
        if self.goodput:
            found["goodput"] = Rate("requests/s", self.num_good() / wall)
        return found

    def num_good(self) -> int:
        """The number of requests that meet every latency limit of the goodput."""
        return sum(
            all(1e3 * _one(t, name) <= bound for name, bound in self.goodput.items())
            for t in self.run.timings
        )


def milliseconds(timings: Sequence[Timing], metric: str) -> list[float]:
    """Return all values of a latency ("ttft", "tpot", "itl" or "e2el"), in milliseconds."""
    if metric == "itl":
        return [1e3 * gap for t in timings for gap in t.itl]
    values = [_one(t, metric) for t in timings]
    return [1e3 * v for v in values if v or metric != "tpot"]  # tpot needs two tokens or more


def _one(timing: Timing, metric: str) -> float:
    return {"ttft": timing.ttft, "tpot": timing.tpot, "e2el": timing.e2e}[metric]


def goodput_bounds(pairs: Sequence[str]) -> dict[str, float]:
    """Return {"ttft": 500.0} for ["ttft:500"]; ConfigError if a pair is malformed."""
    bounds = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        name = {"e2e": "e2el"}.get(name, name)
        if name not in ("ttft", "tpot", "e2el") or not re.fullmatch(r"\d+(\.\d+)?", value):
            msg = (
                f"flag --goodput={pair}: give METRIC:MILLISECONDS, where METRIC is ttft, tpot or "
                "e2el, as in ttft:500"
            )
            raise ConfigError(msg)
        bounds[name] = float(value)
    return bounds


def records(report: Report) -> list[Record]:
    """Return a record per latency and rate; the output rate has its share of the bandwidth."""
    run, where, shape = report.run, report.where, report.parameters
    found = [latency_record(m, report.latency(m), where, shape) for m in report.metrics]
    share = weight_reading(run.before, run.after, run.wall_s)
    for name, (unit, value, better) in report.rates().items():
        more = {**shape, **report.goodput} if name == "goodput" else shape
        roofs = [value / share] if name == "output" and share else []
        found.append(
            record(name, unit, [value], where, better=better, roofs=roofs, of=ROOF, parameters=more)
        )
    return [f for f in found if f.samples]


def latency_record(
    metric: str, values: list[float], where: Where, parameters: Mapping[str, float | str]
) -> Record:
    """Return a record of latency `values` with at most MOST_SAMPLES samples."""
    kept = values
    if len(values) > MOST_SAMPLES:
        kept = [percentile(values, p) for p in range(101)]
    found = {"values": len(values), "p99": round(percentile(values, 99), 4)}
    return record(metric, "ms", kept, where, better="less", parameters=parameters, facts=found)


def summary(report: Report) -> dict[str, Any]:
    """Return the members of a vLLM result file; latencies are in ms, rates are per second."""
    run, rates = report.run, report.rates()
    found: dict[str, Any] = {
        "duration": run.wall_s,
        "completed": len(run.timings),
        "failed": len(run.errors),
        "total_input_tokens": sum(t.prompt_tokens for t in run.timings),
        "total_output_tokens": run.tokens,
        "request_throughput": rates["requests"].value,
        "request_goodput": rates["goodput"].value if report.goodput else None,
        "output_throughput": rates["output"].value,
        "total_token_throughput": rates["total"].value,
        "request_rate": "inf" if math.isinf(report.pace.rate) else report.pace.rate,
        "burstiness": report.pace.burstiness,
        "max_concurrency": report.pace.concurrency,
    }
    for metric in report.metrics:
        values = report.latency(metric)
        found[f"mean_{metric}_ms"] = fmean(values) if values else 0.0
        found[f"median_{metric}_ms"] = percentile(values, 50)
        found[f"std_{metric}_ms"] = pstdev(values) if values else 0.0
        for p in report.percentiles:
            found[f"p{p:g}_{metric}_ms"] = percentile(values, p)
    return found


def details(run: Run) -> dict[str, Any]:
    """Return the members that --save-detailed adds: lists with one entry per request."""
    return {
        "input_lens": [t.prompt_tokens for t in run.timings],
        "output_lens": [t.tokens for t in run.timings],
        "start_times": [t.started for t in run.timings],
        "ttfts": [t.ttft for t in run.timings],
        "itls": [t.itl for t in run.timings],
        "errors": run.errors,
    }


def file_name(label: str, report: Report, model: str, now: datetime) -> str:
    """Return the name that vLLM would choose for the result file."""
    limit = report.pace.concurrency
    many = f"-concurrency{limit}" if limit else ""
    base = model.rstrip("/").split("/")[-1]
    return f"{label}-{report.pace.rate:g}qps{many}-{base}-{now:%Y%m%d-%H%M%S}.json"


def render(report: Report) -> str:
    """Return the report of the run as text."""
    rows = summary_rows(report)
    width = max(len(name) for name, _ in rows)
    lines = [f"{name.ljust(width)}  {text}" for name, text in rows]
    return "\n".join([*lines, "", *_latency_table(report)])


def markdown(report: Report) -> str:
    """Return the rates and latencies of a run as a Markdown table, with where they were measured.

    People paste this table into issues and messages.
    """
    columns = latency_columns(report)
    blank = [""] * (len(columns) - 1)
    rows = [["", *columns]]
    for name, (unit, value, _) in report.rates().items():
        if name in _PASTED:
            rows.append([f"{name}, {unit}", f"{value:.4g}", *blank])
    for name, shown, _ in latency_rows(report):
        rows.append([f"{name}, ms", *(f"{value:.1f}" for value in shown)])
    return "\n".join([told(report.where), "", *markdown_table(rows)])


def summary_rows(report: Report) -> list[tuple[str, str]]:
    """Return the counts and rates of the run as pairs of name and text."""
    run = report.run
    rows = [
        ("requests", f"{len(run.timings)} completed, {len(run.errors)} failed"),
        ("duration", f"{run.wall_s:.2f} s"),
    ]
    for name, (unit, value, _) in report.rates().items():
        if name != "failed":
            rows.append((name.replace("_", " "), f"{value:.4g} {unit}"))
    share = weight_reading(run.before, run.after, run.wall_s)
    if share:
        rows.append(("bandwidth", f"{100 * share:.1f} % of {ROOF}"))
    return rows


def latency_columns(report: Report) -> list[str]:
    """Return the column titles of the latency table: "mean" and the percentiles."""
    return ["mean", *(f"p{p:g}" for p in report.percentiles)]


def latency_rows(report: Report) -> list[tuple[str, list[float], list[float]]]:
    """Return (name, figures, all values) of each measured latency, in milliseconds."""
    rows = []
    for metric in report.metrics:
        values = list(report.latency(metric))
        if values:
            shown = [fmean(values), *(percentile(values, p) for p in report.percentiles)]
            rows.append((NAMES[metric], shown, values))
    return rows


def _latency_table(report: Report) -> list[str]:
    lines = [f"{'latency, ms':<22}" + "".join(f"{c:>10}" for c in latency_columns(report))]
    for name, shown, _ in latency_rows(report):
        lines.append(f"{name:<22}" + "".join(f"{v:>10.2f}" for v in shown))
    return lines
