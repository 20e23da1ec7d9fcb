#!/usr/bin/env python3
"""Latency of running streams while a long prompt arrives, and TTFT of that prompt; JSON lines.

usage: bench_itl.py MODEL [--streams 8] [--prompt-tokens 4096] [--rounds 3] [--flag=value of serve]

A prompt arrives while the streams decode. The gaps between tokens of all streams are measured
from its arrival until its first token. `itl_p99` is the 99th percentile of these gaps, divided
by the larger of the target and twice the median gap before the prompt. `itl_longest` is the longest
gap divided by that median. `ttft_beside_streams` is the prompt's TTFT divided by the TTFT
of such a prompt alone. The latter is measured right afterwards on a second, idle server,
with prompt chunks of the mean length of the first server's chunks. There is one sample per round.
A round before the measured ones teaches the engine its costs. `itl_longest_before` is the longest
gap without a prompt, divided by the same median, which shows the noise of the machine. The fact
`stolen_ms` is the CPU time that the host of a virtual machine took away while the prompt ran.
"""

import argparse
import asyncio
import random
import sys
import time

import psutil

from cpuserve.bench.driver import Timing, complete, first_model
from cpuserve.bench.schema import Where, percentile, record
from cpuserve.bench.server import ServerProcess
from cpuserve.bench.workload import plain_ids

SETTLE_S = 1.5  # seconds that the streams decode before the prompt arrives
STREAM_TOKENS = 4096
STREAM_PROMPT = 32
VOCAB = 32000  # upper bound of the random token ids


def gaps_between(timing, begin, end):
    """Return the gaps between tokens of a stream that overlap [begin, end], in milliseconds."""
    pairs = zip(timing.stamps, timing.stamps[1:], strict=False)
    return [1e3 * (b - a) for a, b in pairs if b > begin and a < end]


def stolen_s():
    """Return the CPU seconds that the host of this virtual machine has taken so far."""
    return getattr(psutil.cpu_times(), "steal", 0.0)


async def beside(server, args, rng):
    """Run a long prompt while the streams decode.

    Returns (gaps in ms before the prompt, gaps during it, its TTFT in s, its steps, stolen ms).
    """
    target = await first_model(server.url, server.key)
    timings = [Timing(0.0) for _ in range(args.streams)]
    streams = [
        asyncio.ensure_future(
            complete(target, plain_ids(rng, STREAM_PROMPT, VOCAB), STREAM_TOKENS, timing=t)
        )
        for t in timings
    ]
    while not all(t.stamps for t in timings):
        await asyncio.sleep(0.05)
    await asyncio.sleep(SETTLE_S)
    alone_from = time.perf_counter() - 0.8 * SETTLE_S
    stolen = stolen_s()
    prompt = await complete(target, plain_ids(rng, args.prompt_tokens, VOCAB), 1)
    stolen = stolen_s() - stolen
    begin, end = prompt.started, prompt.stamps[0]
    for task in streams:
        task.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    steps = max(len(gaps_between(t, begin, end)) for t in timings)
    return (
        [g for t in timings for g in gaps_between(t, alone_from, begin)],
        [g for t in timings for g in gaps_between(t, begin, end)],
        prompt.ttft,
        steps,
        round(1e3 * stolen),
    )


async def learn(server, args, rng):
    """Run a prompt and a round that do not count; the cost model learns this host."""
    await complete(await first_model(server.url, server.key), plain_ids(rng, 256, VOCAB), 4)
    await beside(server, args, rng)


async def alone(server, args, rng):
    """Return the TTFT of the second of two prompts on an idle server; the first one maps memory."""
    target = await first_model(server.url, server.key)
    times = [await complete(target, plain_ids(rng, args.prompt_tokens, VOCAB), 1) for _ in range(2)]
    return times[-1].ttft


def round_of(server, command, args, rng):
    """Return (gaps before, gaps during, TTFT with streams, TTFT alone, mean chunk, stolen ms)."""
    before, during, ttft, steps, stolen = asyncio.run(beside(server, args, rng))
    chunk = max(1, round(args.prompt_tokens / steps))
    with ServerProcess([*command, f"--long-prefill-token-threshold={chunk}"]) as second:
        return before, during, ttft, asyncio.run(alone(second, args, rng)), chunk, stolen


def bounded(values, bounds):
    """Return each latency divided by its bound."""
    return [v / b for v, b in zip(values, bounds, strict=True)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--itl-target-ms", type=float, default=50)
    args, more = parser.parse_known_args()
    more.append(f"--itl-target-ms={args.itl_target_ms:g}")
    rng = random.Random(0)
    command = [args.model, *more]
    with ServerProcess(command) as server:
        asyncio.run(learn(server, args, rng))
        rounds = [round_of(server, command, args, rng) for _ in range(args.rounds)]
    where = Where(host="", isa="", threads=0, model=args.model)
    shape = {"streams": args.streams, "prompt_tokens": args.prompt_tokens}
    shape["itl_target_ms"] = args.itl_target_ms
    facts = {"chunks": [r[4] for r in rounds], "alone_s": [round(r[3], 3) for r in rounds]}
    facts["stolen_ms"] = [r[5] for r in rounds]
    medians = [percentile(r[0], 50) for r in rounds]
    p99s = [percentile(r[1], 99) for r in rounds]
    longest = [max(r[1]) for r in rounds]
    for name, unit, samples in (
        ("itl_before_prompt_median", "ms", medians),
        ("itl_beside_prompt_median", "ms", [percentile(r[1], 50) for r in rounds]),
        ("itl_beside_prompt_p99", "ms", p99s),
        # Each ratio compares times of one round, because the speed of a shared machine drifts.
        ("itl_p99", "x target", bounded(p99s, [max(args.itl_target_ms, 2 * m) for m in medians])),
        ("itl_longest_before", "x median", bounded([max(r[0]) for r in rounds], medians)),
        ("itl_longest", "x median", bounded(longest, medians)),
        ("ttft_beside_streams", "x alone", bounded([r[2] for r in rounds], [r[3] for r in rounds])),
    ):
        found = record(name, unit, samples, where, better="less", parameters=shape, facts=facts)
        print(found.to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
