#!/usr/bin/env python3
"""TTFT of a short request after a long prompt, and TTFT of that prompt; JSON lines.

usage: bench_short.py MODEL [--long 3000] [--short 16] [--after 1.0] [--rounds 5] [--score]
                            [--flag=value of serve]

The two requests have prompts of random ids and generate one token each. In each round the short
request runs alone, then the long request alone, and then both: the short request starts `--after`
seconds after the long one. `ttft_short` and `ttft_long` are the TTFT of each request when both run,
divided by its TTFT alone in the same round; there is one sample per round.
The first round does not count, because it trains the cost model of the engine.
With --score the long request also asks for prompt log probabilities. Servers refuse those
in a stream, so this request has no stream, and its time is the time of the whole response.
"""

import argparse
import asyncio
import random
import sys
import time

from cpuserve.bench.driver import COMPLETIONS, LoadError, complete, first_model, post
from cpuserve.bench.schema import Where, record
from cpuserve.bench.server import ServerProcess
from cpuserve.bench.workload import plain_ids

VOCAB = 32000  # upper bound of the random token ids
SHORTS_ALONE = 3  # number of short requests that run alone in a round; their median is used


async def round_of(server, args, rng):
    """Return (short alone, long alone, short with long, long with short): TTFT in seconds."""
    target = await first_model(server.url, server.key)

    async def short():
        return (await complete(target, plain_ids(rng, args.short, VOCAB), 1)).ttft

    async def long():
        prompt = plain_ids(rng, args.long, VOCAB)
        if not args.score:
            return (await complete(target, prompt, 1)).ttft
        started = time.perf_counter()
        code, body = await post(target, COMPLETIONS, prompt=prompt, max_tokens=1, prompt_logprobs=0)
        if code != 200:
            msg = f"HTTP {code}: {body[:400].decode(errors='replace')}"
            raise LoadError(msg)
        return time.perf_counter() - started

    shorts = sorted([await short() for _ in range(SHORTS_ALONE)])
    long_alone = await long()
    running = asyncio.ensure_future(long())
    await asyncio.sleep(args.after)
    short_beside = await short()
    return shorts[SHORTS_ALONE // 2], long_alone, short_beside, await running


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--long", type=int, default=3000)
    parser.add_argument("--short", type=int, default=16)
    parser.add_argument("--after", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--score", action="store_true")
    args, more = parser.parse_known_args()
    rng = random.Random(0)
    with ServerProcess([args.model, *more]) as server:
        rounds = [asyncio.run(round_of(server, args, rng)) for _ in range(args.rounds + 1)][1:]
    where = Where(host="", isa="", threads=0, model=args.model)
    shape = {"long": args.long, "short": args.short, "after_s": args.after, "score": args.score}
    names = ("short_alone_s", "long_alone_s", "short_beside_s", "long_beside_s")
    columns = list(zip(*rounds, strict=True))
    facts = {n: [round(x, 4) for x in c] for n, c in zip(names, columns, strict=True)}
    for name, alone, beside in (("ttft_short", 0, 2), ("ttft_long", 1, 3)):
        ratios = [r[beside] / r[alone] for r in rounds]
        found = record(name, "x alone", ratios, where, better="less", parameters=shape, facts=facts)
        print(found.to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
