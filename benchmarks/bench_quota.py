#!/usr/bin/env python3
"""Rates under a CPU quota, as fractions of the rates without; JSON lines. It must run as root.

usage: bench_quota.py MODEL [--quota 1.5] [--rounds 5] [--flag=value of serve]

Runs two servers with the same model: one in its own control group (v1 or v2) with the quota, and
one without. Each chooses its number of threads. They get one request at a time through HTTP, in
alternation. `itl_p99_of_allowance` is the 99th percentile of gaps between tokens, divided by three
median gaps plus one period of the quota.
"""

import argparse
import asyncio
import os
import random
import sys
from contextlib import contextmanager
from pathlib import Path

from cpuserve.bench.driver import complete, first_model
from cpuserve.bench.observe import where
from cpuserve.bench.schema import percentile, record
from cpuserve.bench.server import Server
from cpuserve.bench.workload import plain_ids
from cpuserve.cli.bench_flags import number

PERIOD_US = 100_000
V1, V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")


@contextmanager
def quota_of(cpus):
    """A control group with a quota of `cpus` CPUs during the block; gives its directory."""
    v1 = (V1 / "cpu.cfs_quota_us").exists()
    parent = V1 if v1 else V2
    group = parent / f"cpuserve-quota-{os.getpid()}"
    if not v1:
        (parent / "cgroup.subtree_control").write_text("+cpu")
    group.mkdir()
    try:
        quota = round(cpus * PERIOD_US)
        if v1:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        yield group
    finally:
        group.rmdir()


def started_in(group, arguments):
    """Start a server in control group `group`, which children inherit from this process."""
    (group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        return Server(arguments)
    finally:
        (group.parent / "cgroup.procs").write_text(str(os.getpid()))


def rates(target, rng, args):
    """(decode rate, prefill rate, gaps): of one request each, in tokens per second and ms."""
    decode = asyncio.run(complete(target, plain_ids(rng, 32, args.vocab_size), args.output_tokens))
    prompt = plain_ids(rng, args.prompt_tokens, args.vocab_size)
    prefill = asyncio.run(complete(target, prompt, 1))
    gaps = [1e3 * gap for gap in decode.itl]
    return decode.decode_rate, args.prompt_tokens / prefill.ttft, gaps


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--quota", type=float, default=1.5, help="CPUs")
    parser.add_argument("--rounds", type=number(int, 1), default=5)
    parser.add_argument("--prompt-tokens", type=number(int, 1), default=512)
    parser.add_argument("--output-tokens", type=number(int, 2), default=128)
    parser.add_argument(
        "--vocab-size", type=int, default=32000, help="upper bound of the random token ids"
    )
    args, more = parser.parse_known_args(argv)
    rng = random.Random(0)
    serve = [args.model, *more]
    with (
        quota_of(args.quota) as group,
        started_in(group, serve) as limited,
        Server(serve) as free,
    ):
        targets = [asyncio.run(first_model(s.url, s.key)) for s in (free, limited)]
        here = asyncio.run(where(targets[1]))
        for target in targets:
            rates(target, rng, args)
        rounds = [[rates(target, rng, args) for target in targets] for _ in range(args.rounds)]
    shape = {"quota": args.quota, "output_tokens": args.output_tokens}
    shape["prompt_tokens"] = args.prompt_tokens
    gaps = [sorted(limited[2]) for _, limited in rounds]
    for name, unit, better, samples in (
        ("decode_under_quota", "share", "more", [b[0] / a[0] for a, b in rounds]),
        ("prefill_under_quota", "share", "more", [b[1] / a[1] for a, b in rounds]),
        ("itl_p99_under_quota", "ms", "less", [percentile(g, 99) for g in gaps]),
        (
            "itl_p99_of_allowance",
            "share",
            "less",
            [percentile(g, 99) / (3 * percentile(g, 50) + PERIOD_US / 1e3) for g in gaps],
        ),
    ):
        print(record(name, unit, samples, here, better=better, parameters=shape).to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
