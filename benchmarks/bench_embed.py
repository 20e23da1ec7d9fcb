#!/usr/bin/env python3
"""Embeddings per second of batches of equal prompts; JSON lines.

usage: bench_embed.py MODEL [--rounds 10] [--batch 32] [--tokens 128] [--dtype TYPE]
                      [--quantization SCHEME]

Each round embeds `--batch` prompts of `--tokens` random ids, which differ from round to round.
`embeddings_per_s` has one sample per round; the first round does not count.
`python benchmarks/make_model.py minilm-l6 DIR` writes a model with the shape of all-MiniLM-L6-v2.
"""

import argparse
import random
import sys
import time

from cpuserve import LLM
from cpuserve.bench.schema import Where, record
from cpuserve.cli.bench_flags import number


def measure(llm, args):
    """Return the record of all rounds."""
    rates, ids = [], random.Random(0)
    for round_number in range(args.rounds + 1):
        prompts = [[ids.randrange(5, 500) for _ in range(args.tokens)] for _ in range(args.batch)]
        started = time.perf_counter()
        llm.embed(prompts, use_tqdm=False)
        if round_number:
            rates.append(args.batch / (time.perf_counter() - started))
    config = llm.config
    place = Where(host="", isa=config.isa, threads=config.threads, model=config.model)
    kind = config.dtype if config.quantize == "none" else config.quantize
    shape = {"batch": args.batch, "tokens": args.tokens, "weights": kind}
    return record("embeddings_per_s", "1/s", rates, place, better="more", parameters=shape)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--rounds", type=number(int, 1), default=10)
    parser.add_argument("--batch", type=number(int, 1), default=32)
    parser.add_argument("--tokens", type=number(int, 1), default=128)
    parser.add_argument("--dtype")
    parser.add_argument("--quantization")
    args = parser.parse_args(argv)
    options = {"max_num_batched_tokens": max(2048, args.batch * args.tokens)}
    options |= {k: getattr(args, k) for k in ("dtype", "quantization") if getattr(args, k)}
    with LLM(args.model, max_num_seqs=args.batch, **options) as llm:
        print(measure(llm, args).to_json(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
