#!/usr/bin/env python3
"""Gain by prefix caching in cpuserve and in vLLM, on the same weights and in alternation.

usage: prefix.py DIR [--rounds 5] [--peers vllm]

"shared": prompt tokens per second of 12 prompts of 1,024 tokens with the same first 960 tokens,
divided by the rate of 12 prompts that share nothing. "second turn": time to first token of a prompt
that repeats a prompt of 4,096 tokens and adds 64 tokens, divided by that of the first prompt.
"""

import argparse
import os
import random
import sys
from functools import partial
from statistics import median

from run import alternated, engines

from cpuserve.bench.driver import complete, run_closed
from cpuserve.bench.workload import plain_ids

REQUESTS, PROMPT, SHARED = 12, 1024, 960
TURN, MORE = 4096, 64


async def ratios(target, args):
    """Return {"shared": rate with / without a common prefix, "second turn": TTFT / first TTFT}."""
    rng = random.Random()

    def tokens(n):
        return plain_ids(rng, n, args.vocab)

    async def rate(prompts):
        _, wall = await run_closed([partial(complete, target, p, 1) for p in prompts], REQUESTS)
        return REQUESTS * PROMPT / wall

    await complete(target, tokens(64), 4)
    alone = await rate([tokens(PROMPT) for _ in range(REQUESTS)])
    prefix = tokens(SHARED)
    shared = await rate([prefix + tokens(PROMPT - SHARED) for _ in range(REQUESTS)])
    turn = tokens(TURN)
    first = await complete(target, turn, 1)
    second = await complete(target, turn + tokens(MORE), 1)
    return {"shared": shared / alone, "second turn": second.ttft / first.ttft}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dir")
    parser.add_argument("--peers", nargs="*", default=["vllm"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--vocab", type=int, default=40000)
    args = parser.parse_args()
    args.gguf, args.from_dir, args.own, args.context = None, False, [], 8192
    args.port = 8101
    samples = alternated(engines(args), args.rounds, lambda server: server.measure(args, ratios))
    print("| engine | 960 of 1,024 tokens shared: x the rate without | second turn: TTFT / first |")
    print("|---|---|---|")
    for name, rounds in samples.items():
        shared, second = (median(r[k] for r in rounds) for k in ("shared", "second turn"))
        print(f"| {name} | {shared:.1f} x | {100 * second:.1f} % |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
