#!/usr/bin/env python3
"""What a type of the KV cache costs, compared with bf16 and the same weights.

usage: kv_loss.py [MODEL] [--kv-cache-dtype TYPE ...] [--positions N ...] [--passages N]

Prints for each type the loss in nats per token over passages of tests/data/fidelity.txt,
and for each position the KL divergence of the next token there: the mean over 16 tokens that end
at the position, of the passages and docs in a row. Of the 20 likeliest tokens with each type,
those that both have count one by one, and all others as one.
"""

import argparse
import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cpuserve import LLM, SamplingParams  # noqa: E402
from tests.fidelity.passages import passages  # noqa: E402

TOKENS = 16  # next tokens at a position
NEXT = SamplingParams(max_tokens=1, temperature=0, logprobs=20)
SCORE = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)


def long_text():
    docs = sorted((ROOT / "docs").rglob("*.md"))
    return "\n\n".join([*passages(), *(path.read_text(encoding="utf-8") for path in docs)])


def measured(model, kv, count, positions):
    """Return (nats of each passage, {position: distributions of the next tokens})."""
    length = max([4096, *(n + 64 for n in positions)])
    with LLM(model, kv_cache_dtype=kv, max_model_len=length, speculate="off") as llm:
        nats = []
        for text in passages()[:count]:
            (output,) = llm.generate([text], SCORE, use_tqdm=False)
            scores = [next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]]
            nats.append((-sum(scores), len(scores)))
        ids = llm.get_tokenizer().encode(long_text())
        tops = {n: [next_token(llm, ids[:end]) for end in range(n - TOKENS, n)] for n in positions}
    return nats, tops


def next_token(llm, ids):
    (output,) = llm.generate([{"prompt_token_ids": ids}], NEXT, use_tqdm=False)
    return {token: entry.logprob for token, entry in output.outputs[0].logprobs[0].items()}


def divergence(before, after):
    """Return the KL divergence of two distributions, of which the likeliest tokens are known."""
    both = before.keys() & after.keys()
    total = sum(math.exp(before[t]) * (before[t] - after[t]) for t in both)
    rest = [max(1e-9, 1 - sum(math.exp(x[t]) for t in both)) for x in (before, after)]
    return total + rest[0] * math.log(rest[0] / rest[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2:135m")
    parser.add_argument("--kv-cache-dtype", nargs="+", default=["int8", "int8_v4"])
    parser.add_argument("--positions", nargs="*", type=int, default=[])
    parser.add_argument("--passages", type=int, default=None)
    args = parser.parse_args()
    plain, tops = measured(args.model, "bfloat16", args.passages, args.positions)
    tokens = max(1, sum(count for _, count in plain))
    for kv in args.kv_cache_dtype:
        nats, others = measured(args.model, kv, args.passages, args.positions)
        lost = sum(after - before for (after, _), (before, _) in zip(nats, plain, strict=True))
        print(f"{kv:10s} {lost / tokens:+.5f} nats per token over {tokens} tokens", flush=True)
        for n in args.positions:
            pairs = list(zip(tops[n], others[n], strict=True))
            mean = sum(divergence(a, b) for a, b in pairs) / len(pairs)
            print(f"{kv:10s} {mean:.5f} nats KL at position {n}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
