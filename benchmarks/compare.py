#!/usr/bin/env python3
"""Compare two files of benchmark records: which metrics got better or worse by more than noise.

usage: compare.py BEFORE.jsonl AFTER.jsonl [--threshold 0.05]

Records are matched by metric, model and parameters. If both have a fraction of the same roof,
the fractions are compared, because the speed of machines drifts; otherwise the medians.
A change counts if it exceeds the threshold and the ranges from the 5th to the 95th percentile
of the rounds do not overlap ("noise" if they do). If samples are requests, the ranges
are the 95 % confidence intervals of the medians. Lines that could not be used are listed on stderr.
The exit code is 1 if a metric got worse, and 2 if the files have no measurement in common.
"""

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cpuserve.bench.schema import Record, percentile


@dataclass(frozen=True)
class Compared:
    """One side of a comparison: a median and its range; sign -1 = less is better, 1 = more is."""

    median: float
    low: float
    high: float
    sign: int


def key(record: Record) -> tuple:
    """Return the key that identifies a measurement; only records with equal keys are compared."""
    stable = {k: v for k, v in record.parameters.items() if k != "seed"}
    return record.metric, record.model, tuple(sorted(stable.items()))


def load(path: str) -> dict[tuple, Record]:
    """Return the last record of each measurement in a file; report unused lines on stderr."""
    found = {}
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = msgspec.json.decode(line, type=Record)
        except msgspec.DecodeError as error:
            print(f"{path}:{number}: skipped, not a record: {error}", file=sys.stderr)
            continue
        if key(record) in found:
            again = f"{record.metric} is measured again here, the earlier record is not used"
            print(f"{path}:{number}: {again}", file=sys.stderr)
        found[key(record)] = record
    return found


def compared(before: Record, after: Record) -> tuple[Compared, Compared]:
    """Return both sides: fractions of the roof if both records have the same one, else medians."""
    if before.of == after.of and None not in (before.fraction, after.fraction):
        sides = [(r.fraction, r.fraction_p5, r.fraction_p95, 1) for r in (before, after)]
    else:
        sign = 1 if after.better == "more" else -1
        sides = [(r.median, *spread(r), sign) for r in (before, after)]
    return Compared(*sides[0]), Compared(*sides[1])


def spread(record: Record) -> tuple[float, float]:
    """Return the range of the median that noise explains: (p5, p95) of the samples of rounds.

    Samples that are requests differ for other reasons than noise,
    so for them the range is the 95 % confidence interval of the median.
    """
    values = record.facts.get("values")
    if values is None:
        return record.p5, record.p95
    half = 98 / math.sqrt(float(values))
    low, high = max(50 - half, 0), min(50 + half, 100)
    return percentile(record.samples, low), percentile(record.samples, high)


def gain(before: Compared, after: Compared) -> float:
    """Return the change relative to `before`; negative if worse, infinite if `before` is 0."""
    change = (after.median - before.median) * after.sign
    if change == 0:
        return 0.0
    return change / abs(before.median) if before.median else math.copysign(math.inf, change)


def verdict(before: Compared, after: Compared, threshold: float) -> str:
    """Return "better" or "WORSE"; "same" within the threshold, "noise" if the ranges overlap."""
    change = gain(before, after)
    if abs(change) <= threshold:
        return "same"
    if before.low <= after.high and after.low <= before.high:
        return "noise"
    return "better" if change > 0 else "WORSE"


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--threshold", type=float, default=0.05)
    args = parser.parse_args(argv)
    before, after = load(args.before), load(args.after)
    worse = 0
    for name in (n for n in before if n in after):
        b, a = before[name], after[name]
        sides = compared(b, a)
        found = verdict(*sides, args.threshold)
        worse += found == "WORSE"
        shape = " ".join(f"{k}={v}" for k, v in name[2])
        print(
            f"{b.metric:<24} {b.median:>10g} -> {a.median:>10g} {b.unit:<10} "
            f"{100 * gain(*sides):+6.1f} %  {found:<6} {shape}".rstrip()
        )
    for name in [*(n for n in before if n not in after), *(n for n in after if n not in before)]:
        where = "before" if name in before else "after"
        print(f"{name[0]:<24} only in {where} {' '.join(f'{k}={v}' for k, v in name[2])}".rstrip())
    if not before.keys() & after.keys():
        print("no measurement is in both files, so nothing was compared", file=sys.stderr)
        return 2
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
