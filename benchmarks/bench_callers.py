#!/usr/bin/env python3
"""Time of one caller's requests while another caller is greedy in many ways; JSON lines.

usage: bench_callers.py MODEL [--kinds prompts tokenize ...] [--long 600] [--short 100]
                        [--rounds 5] [--samples 3] [--crowd 60] [--flag=value of serve]

greedy_callers.py has the kinds of greedy callers: long prompts, more streams than slots, batches,
refused requests, uploads and others. Meanwhile the modest caller sends single prompts
of --short tokens, and of --long tokens, with pauses. `time_beside_KIND` is the time of these
requests, divided by their time without the greedy caller: on an idle server or, where requests
of the greedy caller run for long, on a server with all slots but one taken by streams. Rounds with
and without the greedy caller take turns. Prompts are random ids, and the modest caller generates
one token. The kind "embeddings" needs a model for embeddings.

`cpu_ms` in facts is the CPU time of the front end's process for a request of the greedy caller.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import replace
from statistics import median

from bench_front_end import Clock
from greedy_callers import KINDS, SEQS, VOCAB, GreedyProcess, Sizes

from cpuserve.bench.driver import COMPLETIONS, LoadError, complete, first_model
from cpuserve.bench.http import exchange
from cpuserve.bench.observe import where
from cpuserve.bench.schema import record
from cpuserve.bench.server import ServerProcess
from cpuserve.bench.workload import plain_ids
from cpuserve.cli.bench_flags import number

MODEST = "the-key-of-the-modest-caller"
PAUSE_S = 0.5  # the modest caller uses much less than half of the server
SETTLE_S = 3.0  # until all slots are taken


class Modest:
    """The modest caller."""

    rng = random.Random(0)  # of all, so that no prompt comes twice

    def __init__(self, target, path):
        self.target, self.path = replace(target, api_key=MODEST), path

    async def took(self, length):
        """Return the seconds that a request takes with a prompt of `length` new tokens."""
        await asyncio.sleep(PAUSE_S * self.rng.uniform(0.5, 1.5))
        ids = plain_ids(self.rng, length, VOCAB)
        if self.path == COMPLETIONS:
            timing = await complete(self.target, ids, 1)
            if timing.cached_tokens:
                msg = f"{timing.cached_tokens} of {length} tokens were cached: nothing was measured"
                raise LoadError(msg)
            return timing.ttft
        body = json.dumps({"model": self.target.model, "input": [ids]}).encode()
        begun = time.perf_counter()
        response = await exchange(self.target.url, self.path, body, api_key=MODEST)
        if response.code != 200:
            msg = f"HTTP {response.code}: {response.body[:400].decode()}"
            raise LoadError(msg)
        return time.perf_counter() - begun


@contextmanager
def nothing():
    yield None


async def measure(target, clock, args, kind):
    """Return ({length: [(seconds without, seconds with)]}, CPU ms of a greedy request)."""
    modest = Modest(target, KINDS[kind].modest)
    sizes = Sizes(args.long, args.crowd)
    found = {length: [] for length in (args.short, args.long)}
    used, sent = 0, 0

    async def samples():
        return {n: [await modest.took(n) for _ in range(args.samples)] for n in found}

    for _ in range(args.rounds):
        without = GreedyProcess(target, sizes, "") if KINDS[kind].running else nothing()
        with without as streams:
            await asyncio.sleep(SETTLE_S if streams else PAUSE_S)
            alone = await samples()
        with GreedyProcess(target, sizes, kind) as greedy:
            await asyncio.sleep(SETTLE_S)
            used -= clock.read()
            beside = await samples()
            used += clock.read()
        sent += greedy.count
        await asyncio.sleep(PAUSE_S)
        for length, pairs in found.items():
            pairs.append((alone[length], beside[length]))
    return found, used / 1e6 / max(sent, 1)


async def measure_all(server, args):
    """Print the records of all kinds."""
    target, clock = await first_model(server.url, server.key), Clock(server.process.pid)
    here = await where(target)
    for _ in range(3):  # trains the cost model of the engine
        for path in {KINDS[kind].modest for kind in args.kinds}:
            await Modest(target, path).took(args.long)
    for kind in args.kinds:
        lengths, cpu_ms = await measure(target, clock, args, kind)
        for length, pairs in lengths.items():
            without = [each for alone, _ in pairs for each in alone]
            worst = max(each for _, beside in pairs for each in beside)
            facts = {
                "without_s": round(median(without), 4),
                "worst_s": round(worst, 4),
                "cpu_ms": round(cpu_ms, 2),
            }
            made = record(
                f"time_beside_{kind}", "x alone",
                [median(beside) / median(alone) for alone, beside in pairs], here, better="less",
                parameters={"tokens": length, "long": args.long, "crowd": args.crowd}, facts=facts,
            )  # fmt: skip
            print(made.to_json(), flush=True)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS][:-1])
    parser.add_argument("--long", type=number(int, 1), default=600)
    parser.add_argument("--short", type=number(int, 1), default=100)
    parser.add_argument("--rounds", type=number(int, 1), default=5)
    parser.add_argument("--samples", type=number(int, 1), default=3, help="of a round")
    parser.add_argument("--crowd", type=number(int, 1), default=60)
    args, more = parser.parse_known_args(argv)
    with tempfile.TemporaryDirectory() as files:
        flags = [f"--max-num-seqs={SEQS}", f"--files-dir={files}", f"--api-key={MODEST}"]
        flags += ["--access-log=off"]  # clients that end their greedy requests fill it
        with ServerProcess([args.model, *flags, *more]) as server:
            asyncio.run(measure_all(server, args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
