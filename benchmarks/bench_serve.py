#!/usr/bin/env python3
"""Load an OpenAI-compatible server with a mix of requests; JSON lines of latencies and rates.

usage: bench_serve.py URL MODEL [--mix random|shared-prefix|multi-turn|sharegpt] [options]

Closed loop (--concurrency N) or open loop (--rate R requests a second, Poisson arrivals). Goodput
counts the requests that keep every bound of --goodput, in milliseconds: --goodput ttft:500 tpot:50.
Prompts are token ids drawn from --seed, so two servers get the same work.
"""

import argparse
import asyncio
import random
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from cpuserve.bench.driver import LoadError, Target, Timing, complete, run_closed, run_open
from cpuserve.bench.measure import latency_records
from cpuserve.bench.schema import Record, Where, record

Job = Callable[[], Awaitable[list[Timing]]]
# ShareGPT as vLLM's benchmark filters it: log-normal lengths fitted to their published quantiles
# (prompts: median about 100, mean 220; answers: median about 150, mean 200).
SHAREGPT_PROMPT = (4.6, 1.2)
SHAREGPT_ANSWER = (5.0, 0.8)
SHAREGPT_LIMIT = 1024


@dataclass(frozen=True)
class Shape:
    """How long requests are, in tokens; `turns` of one conversation, `shared` prefix tokens."""

    prompt: int
    answer: int
    shared: int
    turns: int


class Mix:
    """Makes the jobs of one mix."""

    def __init__(self, name: str, shape: Shape, target: Target, vocab: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.shape, self.target, self.vocab = shape, target, vocab
        self.prefix = self.ids(shape.shared)
        self.make = {
            "random": self.random,
            "shared-prefix": self.shared_prefix,
            "multi-turn": self.multi_turn,
            "sharegpt": self.sharegpt,
        }[name]

    def ids(self, count: int) -> list[int]:
        """`count` random token ids."""
        return [self.rng.randrange(300, min(self.vocab, 40000)) for _ in range(count)]

    def random(self) -> Job:
        """Prompts with nothing in common, half to one and a half times the length asked."""
        return self._one(self.ids(self._about(self.shape.prompt)), self._about(self.shape.answer))

    def shared_prefix(self) -> Job:
        """A common system prompt before each request's own part."""
        return self._one([*self.prefix, *self.ids(self.shape.prompt)], self.shape.answer)

    def sharegpt(self) -> Job:
        """Lengths as people's chats have them."""
        prompt = min(SHAREGPT_LIMIT, max(4, int(self.rng.lognormvariate(*SHAREGPT_PROMPT))))
        answer = min(SHAREGPT_LIMIT, max(4, int(self.rng.lognormvariate(*SHAREGPT_ANSWER))))
        return self._one(self.ids(prompt), answer)

    def multi_turn(self) -> Job:
        """A conversation: every turn sends all that was said before."""
        said = [self.ids(self.shape.prompt) for _ in range(self.shape.turns)]

        async def talk() -> list[Timing]:
            history: list[int] = list(self.prefix)
            timings = []
            for words in said:
                history += words
                timing = await complete(self.target, history, self.shape.answer)
                history += timing.ids
                timings.append(timing)
            return timings

        return talk

    def _one(self, prompt: list[int], answer: int) -> Job:
        async def ask() -> list[Timing]:
            return [await complete(self.target, prompt, answer)]

        return ask

    def _about(self, length: int) -> int:
        return max(1, int(length * self.rng.uniform(0.5, 1.5)))


def records(args, timings: list[Timing], wall: float) -> list[Record]:
    """Latencies, rates and goodput of a finished run."""
    where = Where(host=args.host_name, isa="", threads=0, model=args.model)
    shape = {"mix": args.mix, "requests": len(timings), "seed": args.seed}
    load = {"rate": args.rate} if args.rate else {"concurrency": args.concurrency}
    more = {**shape, **load}
    found = latency_records(timings, where, more)
    out = sum(t.tokens for t in timings)
    cached = sum(t.cached_tokens for t in timings)
    prompts = sum(t.prompt_tokens for t in timings)
    for name, unit, value in (
        ("output", "tokens/s", out / wall),
        ("prompt", "tokens/s", prompts / wall),
        ("requests", "requests/s", len(timings) / wall),
        ("cached_prompt", "share", cached / prompts if prompts else 0.0),
    ):
        found.append(record(name, unit, [value], where, parameters=more))
    if args.goodput:
        bounds = dict(bound.split(":") for bound in args.goodput)
        kept = [
            t for t in timings if all(1e3 * getattr(t, k) <= float(v) for k, v in bounds.items())
        ]
        good = len(kept) / wall
        found.append(record("goodput", "requests/s", [good], where, parameters={**more, **bounds}))
    return found


async def run(args) -> list[Record]:
    """Drive the server and measure."""
    target = Target(args.url.rstrip("/").removesuffix("/v1"), args.model, args.api_key)
    shape = Shape(args.prompt_tokens, args.output_tokens, args.shared_tokens, args.turns)
    mix = Mix(args.mix, shape, target, args.vocab, args.seed)
    jobs = [mix.make() for _ in range(args.requests)]
    await complete(target, mix.ids(16), 4)  # warm
    if args.rate:
        gaps = [mix.rng.expovariate(args.rate) for _ in jobs]
        results, wall = await run_open(jobs, gaps)
    else:
        results, wall = await run_closed(jobs, args.concurrency)
    return records(args, [t for timings in results for t in timings], wall)


def parse(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("model")
    mixes = ("random", "shared-prefix", "multi-turn", "sharegpt")
    parser.add_argument("--mix", choices=mixes, default="random")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--rate", type=float, help="requests a second, instead of --concurrency")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--shared-tokens", type=int, default=960)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--goodput", nargs="+", metavar="KIND:MS", help="ttft:500 tpot:50 e2e:9000")
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--api-key")
    parser.add_argument("--host-name", default="", help="of the machine, for the records")
    return parser.parse_args(argv)


def main() -> int:
    try:
        for found in asyncio.run(run(parse())):
            print(found.to_json())
    except LoadError as e:
        print(f"bench_serve: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
