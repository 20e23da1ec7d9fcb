#!/usr/bin/env python3
"""TTFT of one caller while another caller is greedy in three ways; JSON lines.

usage: bench_callers.py MODEL [--long 600] [--short 100] [--rounds 7] [--crowd 60]
                        [--flag=value of serve]

The greedy caller keeps --crowd requests with prompts of --long tokens waiting ("prompts"),
or more streams than the server has slots ("streams"), or runs a batch of --crowd lines ("batch").
Meanwhile the modest caller sends single prompts of --short tokens, and of --long tokens,
with pauses. `ttft_beside_KIND` is the TTFT of the modest caller, divided by its TTFT on an idle
server ("prompts"), or on a server with one stream less than slots ("streams", and "batch",
because its lines generate tokens as well).
Prompts are random ids, and the modest caller generates one token.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from statistics import median

import httpx

from cpuserve.bench.driver import COMPLETIONS, LoadError, complete, first_model
from cpuserve.bench.schema import Where, record
from cpuserve.bench.server import ServerProcess
from cpuserve.bench.workload import plain_ids

VOCAB = 200  # upper bound of the random token ids, which every model has
SEQS = 8
STREAM_TOKENS = 200
MODEST = "the-key-of-the-modest-caller"
PAUSE_S = 1.0  # the modest caller uses much less than half of the server


class Callers:
    """Both callers of one server."""

    def __init__(self, target, args):
        self.greedy = target
        self.modest = replace(target, api_key=MODEST)
        self.args = args
        self.rng = random.Random(0)

    def ids(self, length):
        return plain_ids(self.rng, length, VOCAB)

    async def ttft(self, length):
        """Return the seconds to the first token of the modest caller: one for each round."""
        found = []
        for _ in range(self.args.rounds):
            await asyncio.sleep(PAUSE_S * self.rng.uniform(0.5, 1.5))
            took = await complete(self.modest, self.ids(length), 1)
            if took.cached_tokens:
                msg = f"{took.cached_tokens} of {length} tokens were cached: nothing was measured"
                raise LoadError(msg)
            found.append(took.ttft)
        return found

    @asynccontextmanager
    async def nothing(self):
        yield

    @asynccontextmanager
    async def requests(self, count, prompt_tokens, max_tokens):
        """Keep `count` requests of the greedy caller in the server."""

        async def work():
            while True:
                with suppress(LoadError):
                    await complete(self.greedy, self.ids(prompt_tokens), max_tokens)

        tasks = [asyncio.create_task(work()) for _ in range(count)]
        try:
            await asyncio.sleep(4 * PAUSE_S)  # until all slots are taken
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(PAUSE_S)

    @asynccontextmanager
    async def batch(self):
        """Run a batch of the greedy caller."""
        headers = {"authorization": f"Bearer {self.greedy.api_key}"}
        async with httpx.AsyncClient(base_url=self.greedy.url, headers=headers) as client:
            body = {"model": self.greedy.model, "max_tokens": 32, "ignore_eos": True}
            lines = [
                {
                    "custom_id": str(number),
                    "method": "POST",
                    "url": COMPLETIONS,
                    "body": {**body, "prompt": self.ids(self.args.long)},
                }
                for number in range(20 * self.args.crowd)
            ]
            data = "\n".join(map(json.dumps, lines)).encode()
            sent = await client.post(
                "/v1/files", files={"file": ("lines.jsonl", data)}, data={"purpose": "batch"}
            )
            asked = {"input_file_id": sent.json()["id"], "endpoint": COMPLETIONS}
            made = await client.post("/v1/batches", json={**asked, "completion_window": "24h"})
            name = made.json()["id"]
            try:
                await asyncio.sleep(4 * PAUSE_S)
                yield
                if (await client.get(f"/v1/batches/{name}")).json()["status"] != "in_progress":
                    msg = "the batch has ended before the measurement: use a larger --crowd"
                    raise LoadError(msg)
            finally:
                await client.post(f"/v1/batches/{name}/cancel")
                await asyncio.sleep(PAUSE_S)


async def measure(server, args):
    """Return {kind: {length: (TTFT without, TTFT with the greedy caller)}}."""
    callers = Callers(await first_model(server.url, server.key), args)
    few = partial(callers.requests, SEQS - 1, 16, STREAM_TOKENS)
    kinds = {
        "prompts": (callers.nothing(), callers.requests(args.crowd, args.long, 1)),
        "streams": (few(), callers.requests(3 * SEQS, 16, STREAM_TOKENS)),
        "batch": (few(), callers.batch()),
    }
    await callers.ttft(args.long)  # trains the cost model of the engine
    found = {}
    for kind, states in kinds.items():
        took = []
        for state in states:
            async with state:
                took.append({n: await callers.ttft(n) for n in (args.short, args.long)})
        found[kind] = {n: tuple(one[n] for one in took) for n in took[0]}
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--long", type=int, default=600)
    parser.add_argument("--short", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--crowd", type=int, default=60)
    args, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as files:
        flags = [f"--max-num-seqs={SEQS}", f"--files-dir={files}", f"--api-key={MODEST}"]
        with ServerProcess([args.model, *flags, *more]) as server:
            found = asyncio.run(measure(server, args))
    where = Where(host="", isa="", threads=0, model=args.model)
    for kind, lengths in found.items():
        for length, (without, beside) in lengths.items():
            ratios = [seconds / median(without) for seconds in beside]
            shape = {"tokens": length, "long": args.long, "crowd": args.crowd}
            facts = {"without_s": round(median(without), 4), "beside_s": round(median(beside), 4)}
            made = record(
                f"ttft_beside_{kind}", "x alone", ratios, where,
                better="less", parameters=shape, facts=facts,
            )  # fmt: skip
            print(made.to_json(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
