#!/usr/bin/env python3
"""Compare two files of benchmark records: which metrics got better or worse, beyond their noise.

usage: compare.py BEFORE.jsonl AFTER.jsonl [--threshold 0.05]

Records are matched by metric, model and parameters. Where both have a fraction of the roofline the
fractions are compared, since machines drift; else the medians. Exit code 1 if anything got worse by
more than the threshold.
"""

import argparse
import sys
from pathlib import Path

import msgspec

from cpuserve.bench.schema import Record

LESS_IS_BETTER = {"s", "ms", "us", "MiB", "count"}


def key(record: Record) -> tuple:
    """What makes two records the same measurement."""
    stable = {k: v for k, v in record.parameters.items() if k != "seed"}
    return record.metric, record.model, tuple(sorted(stable.items()))


def load(path: str) -> dict[tuple, Record]:
    """Records of a file; lines that are not records are skipped."""
    found = {}
    for line in Path(path).read_text().splitlines():
        try:
            record = msgspec.json.decode(line, type=Record)
        except msgspec.DecodeError:
            continue
        found[key(record)] = record
    return found


def gain(before: Record, after: Record) -> float:
    """After over before as a gain: 0.1 is ten percent better."""
    if before.fraction and after.fraction:
        return after.fraction / before.fraction - 1
    if not before.median or not after.median:
        return 0.0
    ratio = after.median / before.median
    return (1 / ratio if before.unit in LESS_IS_BETTER else ratio) - 1


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--threshold", type=float, default=0.05)
    args = parser.parse_args(argv)
    before, after = load(args.before), load(args.after)
    worse = 0
    for name in before.keys() & after.keys():
        b, a = before[name], after[name]
        change = gain(b, a)
        verdict = "same"
        if abs(change) > args.threshold:
            verdict = "better" if change > 0 else "WORSE"
            worse += change < 0
        print(
            f"{b.metric:<24} {b.median:>10g} -> {a.median:>10g} {b.unit:<10} "
            f"{100 * change:+6.1f} %  {verdict}"
        )
    for name in before.keys() ^ after.keys():
        print(f"{name[0]:<24} only in {'before' if name in before else 'after'}")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
