#!/usr/bin/env python3
"""Rates under a CPU quota, as fractions of the rates without; JSON lines. It must run as root.

usage: bench_quota.py MODEL [--quota 1.5] [--rounds 5] [--pair | --servers N] [--flag of serve]

Runs two servers with the same model: one in its own control group (v1 or v2) with the quota,
and one without a quota. Each server chooses its number of threads. The servers get one request
at a time through HTTP, in alternation. `itl_p99_of_allowance` is the 99th percentile
of gaps between tokens, divided by the sum of three median gaps and one period of the quota.

With --pair both servers have the quota, each in its own control group, like two containers on a
machine without cpusets. `prefill_of_pair` and `decode_of_pair` are the sum of both rates, while
each server has a request, divided by the rate of one server alone: 2 if neither slows the other.

With --servers N, N servers have equal quotas that add up to all CPUs, and compute prompts at the
same time for --seconds in each round. `part_of_share` is the share of one server in all computed
prompt tokens, divided by its share of the quotas. It is 1 if each server gets its CPU time.
"""

import argparse
import asyncio
import os
import random
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

from cpuserve.bench.driver import complete, first_model
from cpuserve.bench.observe import where
from cpuserve.bench.schema import percentile, record
from cpuserve.bench.server import ServerProcess
from cpuserve.bench.workload import plain_ids
from cpuserve.cli.bench_flags import number

PERIOD_US = 100_000
V1, V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")


@contextmanager
def quota_of(cpus, name=""):
    """A control group with a quota of `cpus` CPUs during the block; yields its directory."""
    v1 = (V1 / "cpu.cfs_quota_us").exists()
    parent = V1 if v1 else V2
    group = parent / f"cpuserve-quota-{os.getpid()}{name}"
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
        return ServerProcess(arguments)
    finally:
        (group.parent / "cgroup.procs").write_text(str(os.getpid()))


def rates(target, rng, args):
    """Return (decode rate, prefill rate, gaps between tokens): in tokens/s, tokens/s and ms."""
    decode = asyncio.run(complete(target, plain_ids(rng, 32, args.vocab_size), args.output_tokens))
    prompt = plain_ids(rng, args.prompt_tokens, args.vocab_size)
    prefill = asyncio.run(complete(target, prompt, 1))
    gaps = [1e3 * gap for gap in decode.itl]
    return decode.decode_rate, args.prompt_tokens / prefill.ttft, gaps


async def answers(targets, prompt_tokens, output_tokens, rng, args):
    """Send a request to each of `targets` at the same time; return the seconds of each request."""
    prompts = [plain_ids(rng, prompt_tokens, args.vocab_size) for _ in targets]
    sent = zip(targets, prompts, strict=True)
    timings = await asyncio.gather(*(complete(to, ids, output_tokens) for to, ids in sent))
    return [timing.e2e for timing in timings]


def together(targets, rng, args):
    """Return the sums (decode rate, prefill rate) of all `targets`, which each get a request.

    Rates are in tokens/s. The decode rate includes the time of a short prompt:
    gaps between tokens say little if this process itself has to wait for a CPU.
    """
    decode = asyncio.run(answers(targets, 32, args.output_tokens, rng, args))
    prefill = asyncio.run(answers(targets, args.prompt_tokens, 1, rng, args))
    return sum(args.output_tokens / s for s in decode), sum(args.prompt_tokens / s for s in prefill)


def pair(args, serve, rng):
    """Yield the records of two servers under the quota, which work alone in turn, then together."""
    with (
        quota_of(args.quota, "-a") as a,
        quota_of(args.quota, "-b") as b,
        started_in(a, serve) as one,
        started_in(b, serve) as other,
    ):
        targets = [asyncio.run(first_model(s.url, s.key)) for s in (one, other)]
        here = asyncio.run(where(targets[0]))
        together(targets, rng, args)
        found = {"decode_of_pair": [], "prefill_of_pair": []}
        for _ in range(args.rounds):
            each = [together([target], rng, args) for target in targets]
            both = together(targets, rng, args)
            for i, samples in enumerate(found.values()):
                samples.append(2 * both[i] / (each[0][i] + each[1][i]))
    for name, samples in found.items():
        yield record(name, "multiple", samples, here, better="more", parameters=shape_of(args))


async def prompts(target, until, rng, args):
    """Compute prompts one after the other until the time `until`; return prompt tokens/s."""
    began, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() < until:
        await complete(target, plain_ids(rng, args.prompt_tokens, args.vocab_size), 1)
        count += 1
    return count * args.prompt_tokens / (time.perf_counter() - began)


async def at_once(targets, rng, args):
    """Return the prompt rate of each target while all compute prompts at the same time."""
    until = time.perf_counter() + args.seconds
    return await asyncio.gather(*(prompts(target, until, rng, args) for target in targets))


def shared(args, serve, rng):
    """Yield the records of servers under equal quotas that add up to all CPUs."""
    cpus = len(os.sched_getaffinity(0))
    args.quota = cpus / args.servers
    with ExitStack() as stack:
        groups = [stack.enter_context(quota_of(args.quota, f"-{i}")) for i in range(args.servers)]
        servers = [started_in(group, serve) for group in groups]
        for server in servers:
            stack.push(server)  # stops the server at the end; all servers start at the same time
        for server in servers:
            server.__enter__()
        targets = [asyncio.run(first_model(s.url, s.key)) for s in servers]
        here = asyncio.run(where(targets[0]))
        asyncio.run(at_once(targets, rng, args))
        rounds = [asyncio.run(at_once(targets, rng, args)) for _ in range(args.rounds)]
    for i in range(args.servers):
        samples = [rates[i] * args.servers / sum(rates) for rates in rounds]
        shape = {**shape_of(args), "server": i, "servers": args.servers}
        yield record("part_of_share", "ratio", samples, here, better="more", parameters=shape)


def shape_of(args):
    """Return the parameters of the records."""
    sizes = {"output_tokens": args.output_tokens, "prompt_tokens": args.prompt_tokens}
    return {"quota": args.quota, **sizes}


def alone(args, serve, rng):
    """Yield the records of a server under the quota, compared with a server without a quota."""
    with (
        quota_of(args.quota) as group,
        started_in(group, serve) as limited,
        ServerProcess(serve) as free,
    ):
        targets = [asyncio.run(first_model(s.url, s.key)) for s in (free, limited)]
        here = asyncio.run(where(targets[1]))
        for target in targets:
            rates(target, rng, args)
        rounds = [[rates(target, rng, args) for target in targets] for _ in range(args.rounds)]
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
        yield record(name, unit, samples, here, better=better, parameters=shape_of(args))


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
    parser.add_argument("--pair", action="store_true", help="two servers under the quota")
    parser.add_argument("--servers", type=number(int, 2), help="so many, which share all CPUs")
    parser.add_argument("--seconds", type=number(float, 0), default=10, help="of a round of these")
    args, more = parser.parse_known_args(argv)
    rng = random.Random(0)
    serve = [args.model, *more]
    measure = shared if args.servers else pair if args.pair else alone
    for line in measure(args, serve, rng):
        print(line.to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
