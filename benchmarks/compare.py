#!/usr/bin/env python3
"""Compare two files of benchmark records: which metrics got better or worse, beyond their noise.

usage: compare.py BEFORE.jsonl AFTER.jsonl [--threshold 0.05]

Records are matched by metric, model and parameters. Where both have a fraction of the roofline the
fractions are compared, since machines drift; else the medians. A change counts if it is more than
the threshold and the ranges from the 5th to the 95th percentile of the rounds (where samples are
requests: the 95 % intervals of the medians) do not overlap ("noise" if they do). What could not be
compared is told on stderr. Exit code 1 if anything got worse.
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
    """What is held against the other record: a median with its spread; sign -1: less is better."""

    median: float
    low: float
    high: float
    sign: int


def key(record: Record) -> tuple:
    """What makes two records the same measurement."""
    stable = {k: v for k, v in record.parameters.items() if k != "seed"}
    return record.metric, record.model, tuple(sorted(stable.items()))


def load(path: str) -> dict[tuple, Record]:
    """Records of a file, the last of each measurement; lines that are not used are told."""
    found = {}
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = msgspec.json.decode(line, type=Record)
        except msgspec.DecodeError as error:
            print(f"{path}:{number}: skipped, no record: {error}", file=sys.stderr)
            continue
        if key(record) in found:
            again = f"{record.metric} is measured again here, the earlier record is not used"
            print(f"{path}:{number}: {again}", file=sys.stderr)
        found[key(record)] = record
    return found


def compared(before: Record, after: Record) -> tuple[Compared, Compared]:
    """The sides of a comparison: shares of the roof where both have them, else the values."""
    if before.fraction is not None and after.fraction is not None:
        sides = [(r.fraction, r.fraction_p5, r.fraction_p95, 1) for r in (before, after)]
    else:
        sign = 1 if after.better == "more" else -1
        sides = [(r.median, *spread(r), sign) for r in (before, after)]
    return Compared(*sides[0]), Compared(*sides[1])


def spread(record: Record) -> tuple[float, float]:
    """Where the median may lie: in the range of the samples; where these are requests, which differ
    for other reasons than noise, in the 95 % interval of a median of so many."""
    values = record.facts.get("values")
    if values is None:
        return record.p5, record.p95
    half = 98 / math.sqrt(float(values))
    low, high = max(50 - half, 0), min(50 + half, 100)
    return percentile(record.samples, low), percentile(record.samples, high)


def gain(before: Compared, after: Compared) -> float:
    """By which part of `before` it changed, worse is negative; from 0 to anything is infinite."""
    change = (after.median - before.median) * after.sign
    if change == 0:
        return 0.0
    return change / abs(before.median) if before.median else math.copysign(math.inf, change)


def verdict(before: Compared, after: Compared, threshold: float) -> str:
    """ "better" or "WORSE"; "same" within the threshold, "noise" where the spreads overlap."""
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
        print("no measurement is in both files", file=sys.stderr)
        return 2
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
