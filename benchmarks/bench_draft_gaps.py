#!/usr/bin/env python3
"""Longest gaps between tokens of a stream with a long context, with and without drafts; JSON lines.

usage: bench_draft_gaps.py MODEL [--prompt-tokens 128000] [--output-tokens 400] [--rounds 5]
                           [--flag=value of serve]

Two servers, one with `--speculate off` and one as it is by default, stream responses to the same
prompts of random tokens in turn, each with an idle machine. A new prompt each round, so the index
of drafts takes in a whole prompt while the stream runs. `longest_extra_gap` is the longest gap with
drafts less the longest gap without, one sample per round. Its facts are percentiles of all gaps.
"""

import argparse
import asyncio
import itertools
import random
import sys
from contextlib import ExitStack

from cpuserve.bench.driver import complete, first_model
from cpuserve.bench.schema import Where, percentile, record
from cpuserve.bench.server import ServerProcess
from cpuserve.bench.workload import plain_ids

VOCAB = 256  # upper bound of the random token ids; pairs of them come again


async def gaps(server, ids, tokens):
    """Return the gaps between the tokens of a streamed response, in milliseconds."""
    stamps = (await complete(await first_model(server.url, server.key), ids, tokens)).stamps
    return [1e3 * (b - a) for a, b in itertools.pairwise(stamps)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--prompt-tokens", type=int, default=128_000)
    parser.add_argument("--output-tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    args, more = parser.parse_known_args()
    rng, found = random.Random(0), {"off": [], "auto": []}
    with ExitStack() as stack:
        servers = {
            kind: stack.enter_context(ServerProcess([args.model, f"--speculate={kind}", *more]))
            for kind in found
        }
        for number in range(args.rounds + 1):  # the first round does not count
            ids = plain_ids(rng, args.prompt_tokens, VOCAB)
            for kind in sorted(servers, reverse=bool(number % 2)):
                found[kind].append(asyncio.run(gaps(servers[kind], ids, args.output_tokens)))
    off, auto = (rounds[1:] for rounds in found.values())
    facts = {
        f"{kind}_p{percent:g}_ms": round(percentile([g for r in rounds for g in r], percent), 3)
        for kind, rounds in (("off", off), ("auto", auto))
        for percent in (50, 99, 99.9, 100)
    }
    shape = {"prompt_tokens": args.prompt_tokens, "output_tokens": args.output_tokens}
    extra = [max(b) - max(a) for a, b in zip(off, auto, strict=True)]
    where = Where(host="", isa="", threads=0, model=args.model)
    name = "longest_extra_gap"
    print(record(name, "ms", extra, where, better="less", parameters=shape, facts=facts).to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
