#!/usr/bin/env python3
"""Time of many questions about one state, compared with the least work; JSON lines.

usage: bench_decide.py MODEL [--state 4000] [--questions 64] [--rounds 5] [--cpu] [--flag of serve]

In each round, with a new state of random words: `decide` is the time of one request
to /v1/systemone with all questions. The least work is two requests to /v1/completions
that generate one token each. The prompt of the first, `state`, has as many tokens as the state.
The second, `questions`, finds this prompt in the prefix cache, and adds
as many tokens as all questions have. `ratio` is decide / (state + questions), one sample per round;
`again` is the time of `decide` with the state in the cache. The first round does not count.

With --cpu all times are CPU seconds of the server's processes, for a machine that is not quiet.
`again_steps` is the number of steps of `again`.
"""

import argparse
import asyncio
import json
import random
import sys
import time

import psutil

from cpuserve.bench.driver import COMPLETIONS, LoadError, fetch, first_model, post
from cpuserve.bench.schema import Where, record
from cpuserve.bench.server import ServerProcess
from cpuserve.bench.workload import plain_ids

VOCAB = 32000  # random token ids are below this number
BLOCK = 32
WORDS = ("the", "order", "card", "was", "charged", "twice", "and", "then", "she", "asked", "money")
STEPS = "iteration_tokens_total_count"  # of /metrics
AFTER = 2  # tokens of the template after the state: the end of the user's turn


def questions_of(count):
    """Return questions of all types and lengths; no two begin alike, so none share a prefix."""
    kinds = (
        {
            "type": "choice",
            "instructions": "Which team should handle this?",
            "criteria": {"billing": "payments and refunds", "shipping": None, "security": None},
        },
        {"type": "noul", "instructions": "Does the customer need a reply within the hour?"},
        {
            "type": "score",
            "instructions": "How upset is the customer?",
            "criteria": ["calm", "annoyed", "furious"],
        },
    )
    asked = {}
    for i in range(count):
        kind = kinds[i % len(kinds)]
        asked[f"q{i}"] = {**kind, "instructions": f"{i:02}: {kind['instructions']}"}
    return asked


def cpu_seconds(process):
    """Return the CPU seconds of the server and the processes that it has started."""
    every = [psutil.Process(process.pid)]
    every += every[0].children(recursive=True)
    return sum(sum(each.cpu_times()[:2]) for each in every)


async def timed(target, path, clock=time.perf_counter, **body):
    """Return (seconds, response)."""
    started = clock()
    code, answer = await post(target, path, **body)
    took = clock() - started
    if code != 200:
        msg = f"HTTP {code}: {answer[:400].decode(errors='replace')}"
        raise LoadError(msg)
    return took, json.loads(answer)


async def num_steps(target):
    """Return how many steps the engine has run since its start."""
    text = (await fetch(target, "/metrics"))[1].decode()
    (line,) = [li for li in text.splitlines() if STEPS in li]
    return float(line.split()[-1])


async def round_of(server, args, rng):
    """Return the seconds of decide, again, state and questions, and the tokens of the last two.

    The last value is the number of steps of `again`.
    """
    clock = (lambda: cpu_seconds(server.process)) if args.cpu else time.perf_counter
    target = await first_model(server.url, server.key)
    state = " ".join(rng.choices(WORDS, k=args.state))
    message = [{"role": "user", "content": state}]
    asked = {"messages": message, "add_generation_prompt": False}
    num_state = (await timed(target, "/tokenize", **asked))[1]["count"] - AFTER
    body = {"state": state, "questions": questions_of(args.questions)}
    decide, answer = await timed(target, "/v1/systemone", clock, **body)
    before = await num_steps(target)
    again, _ = await timed(target, "/v1/systemone", clock, **body)
    steps = await num_steps(target) - before
    shared = num_state // BLOCK * BLOCK
    repeated = args.questions * (num_state - shared)
    num_own = answer["usage"]["input_tokens"] - shared - repeated
    prompt = plain_ids(rng, num_state, VOCAB)
    one = {"max_tokens": 1, "temperature": 0}
    first, _ = await timed(target, COMPLETIONS, clock, prompt=prompt, **one)
    longer = [*prompt[:shared], *plain_ids(rng, num_own, VOCAB)]
    rest, _ = await timed(target, COMPLETIONS, clock, prompt=longer, **one)
    return decide, again, first, rest, num_state, num_own, steps


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--state", type=int, default=4000)
    parser.add_argument("--questions", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu", action="store_true")
    args, more = parser.parse_known_args()
    rng = random.Random(0)
    with ServerProcess([args.model, *more]) as server:
        rounds = [asyncio.run(round_of(server, args, rng)) for _ in range(args.rounds + 1)][1:]
    where = Where(host="", isa="", threads=0, model=args.model)
    shape = {"state": args.state, "questions": args.questions}
    names = (
        *("decide_s", "again_s", "state_s", "questions_s"),
        *("state_tokens", "question_tokens", "again_steps"),
    )
    columns = list(zip(*rounds, strict=True))
    facts = {n: [round(x, 4) for x in c] for n, c in zip(names, columns, strict=True)}
    ratios = [r[0] / (r[2] + r[3]) for r in rounds]
    unit = "x least work"
    found = record("decide", unit, ratios, where, better="less", parameters=shape, facts=facts)
    print(found.to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
