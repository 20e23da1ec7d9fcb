#!/usr/bin/env python3
"""Measure the decode rate next to one busy process, as a fraction of the rate on an idle machine.

usage: bench_busy.py MODEL [--rounds 5] [--output-tokens 128] [--flag=value of serve]

Sends one request at a time through HTTP, alternating between an idle machine and a machine
where another process spins (not pinned, with the same priority). With n CPUs the fair fraction
is n / (n + 1). If threads wait for a preempted thread, the longest gap between tokens shows it.
"""

import argparse
import asyncio
import random
import subprocess
import sys
import time
from contextlib import contextmanager

from cpuserve.bench.driver import complete, first_model
from cpuserve.bench.observe import where
from cpuserve.bench.schema import record
from cpuserve.bench.server import ServerProcess
from cpuserve.bench.workload import plain_ids
from cpuserve.cli.bench_flags import number

SPIN = "while True: pass"
SETTLE_S = 0.3  # time for the operating system to place the process on a CPU
PROMPT_TOKENS = 32


@contextmanager
def neighbour():
    """Run a process that uses as much CPU time as it can get."""
    process = subprocess.Popen([sys.executable, "-c", SPIN])
    try:
        time.sleep(SETTLE_S)
        yield
    finally:
        process.kill()
        process.wait()


def decode(target, rng, vocab, tokens):
    """Return (tokens per second, longest gap between tokens in ms) of one request."""
    prompt = plain_ids(rng, PROMPT_TOKENS, vocab)
    timing = asyncio.run(complete(target, prompt, tokens))
    return timing.decode_rate, 1e3 * max(timing.itl)


def measure(target, args):
    """Return for each round ((rate, gap) on the idle machine, (rate, gap) next to the process)."""
    rng = random.Random(0)
    decode(target, rng, args.vocab_size, 16)
    rounds = []
    for _ in range(args.rounds):
        quiet = decode(target, rng, args.vocab_size, args.output_tokens)
        with neighbour():
            rounds.append((quiet, decode(target, rng, args.vocab_size, args.output_tokens)))
    return rounds


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--rounds", type=number(int, 1), default=5)
    parser.add_argument("--output-tokens", type=number(int, 2), default=128)
    parser.add_argument(
        "--vocab-size", type=int, default=32000, help="upper bound of the random token ids"
    )
    args, more = parser.parse_known_args(argv)
    with ServerProcess([args.model, *more]) as server:
        target = asyncio.run(first_model(server.url, server.key))
        here = asyncio.run(where(target))
        rounds = measure(target, args)
    shape = {"output_tokens": args.output_tokens, "neighbours": 1}
    quiet, busy = zip(*rounds, strict=True)
    for name, unit, better, samples in (
        ("decode_quiet", "tokens/s", "more", [rate for rate, _ in quiet]),
        ("decode_busy", "tokens/s", "more", [rate for rate, _ in busy]),
        ("longest_gap_busy", "ms", "less", [gap for _, gap in busy]),
        # Each ratio compares rates of one round, because the speed of a shared machine drifts.
        ("busy_of_quiet", "share", "more", [b[0] / q[0] for q, b in rounds]),
    ):
        print(record(name, unit, samples, here, better=better, parameters=shape).to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
