"""Measure rates of a server as fractions of the limit of the machine in the same minute.

The speed of a machine drifts, because other tenants use bandwidth and clock rates change.
So a probe of the machine runs before every measurement, and results are medians of ratios.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cpuserve.bench.driver import Target, Timing, complete, run_closed
from cpuserve.bench.results import METRICS, Report, latency_record, milliseconds, records
from cpuserve.bench.schema import Record, Where, percentile, record
from cpuserve.bench.traffic import Pace, drive
from cpuserve.bench.workload import Talk, plain_ids
from cpuserve.platforms.probe import DOT_KINDS, Roofline

DECODE_PROMPT_TOKENS = 32
TOLD = 20  # a run of many requests tells this often how many have ended


@dataclass(frozen=True, slots=True)
class Work:
    """The work for one token of a model.

    weight_bytes_per_token: bytes of packed weights that are read to decode a token.
    linear_weights: the number of weights of linear layers that a prompt token is multiplied with.
    dot: the type of dot products in linear layers: "bf16", "int8", "int4" or "f32".
    """

    vocab: int
    weight_bytes_per_token: int = 0
    linear_weights: int = 0
    dot: str = "bf16"


@dataclass(frozen=True, slots=True)
class Bench:
    """A server to measure, the probes of its machine, and the sizes of the requests.

    roofline: the probes; None = records have no fraction of a limit.
    concurrency: the number of simultaneous requests.
    warm_ups: the number of rounds that are not recorded.
    """

    target: Target
    where: Where
    work: Work
    roofline: Roofline | None
    rounds: int
    prompt_tokens: int
    output_tokens: int
    concurrency: int
    warm_ups: int = 2

    def prompt(self, rng: random.Random, tokens: int) -> list[int]:
        """Return random token ids; prompts share no prefix, so the prefix cache has no effect."""
        return plain_ids(rng, tokens, self.work.vocab)


def roofline_records(roofline: Roofline, where: Where, rounds: int) -> list[Record]:
    """Measure the memory bandwidth, dot-product rates and barrier latency of this machine."""
    measured = [roofline.measure() for _ in range(rounds)]
    bandwidth = [m["read_bytes_per_s"] / 1e9 for m in measured]
    found = [record("read_bandwidth", "GB/s", bandwidth, where, better="more")]
    for kind in DOT_KINDS:
        rates = [m["dot_ops_per_s"][kind] / 1e9 for m in measured]
        found.append(record(f"dot_{kind}", "GOP/s", rates, where, better="more"))
    barriers = [m["barrier_s"] * 1e6 for m in measured]
    return [*found, record("barrier", "us", barriers, where, better="less")]


async def throughput(bench: Bench, tell: Callable[[str], None]) -> list[Record]:
    """Measure decode rates of one and of several requests, and the prefill rate of one request."""
    await _warm_up(bench)
    tell(f"decode, {bench.output_tokens} tokens, one request")
    decode = await _decode(bench, tell)
    tell(f"prefill, {bench.prompt_tokens} tokens, one request")
    prefill = await _prefill(bench, tell)
    tell(f"decode, {bench.output_tokens} tokens, {bench.concurrency} requests")
    together = await _together(bench, tell)
    return [decode, *prefill, *together]


async def latency(bench: Bench, tell: Callable[[str], None]) -> list[Record]:
    """Measure TTFT, inter-token and end-to-end latency with `concurrency` requests at a time."""
    shape = f"{bench.concurrency} requests of {bench.prompt_tokens} + {bench.output_tokens} tokens"
    tell(f"{bench.rounds} times {shape}")
    rng = random.Random(1)
    timings: list[Timing] = []
    walls: list[float] = []
    for i in range(bench.warm_ups + bench.rounds):
        prompts = [bench.prompt(rng, bench.prompt_tokens) for _ in range(bench.concurrency)]
        jobs = [partial(complete, bench.target, p, bench.output_tokens) for p in prompts]
        found, wall = await run_closed(jobs, bench.concurrency)
        if i >= bench.warm_ups:
            timings += found
            walls.append(1e3 * wall)
    parameters = {
        "prompt_tokens": bench.prompt_tokens,
        "output_tokens": bench.output_tokens,
        "batch_size": bench.concurrency,
    }
    latencies = {metric: milliseconds(timings, metric) for metric in METRICS}
    return [
        *(latency_record(m, v, bench.where, parameters) for m, v in latencies.items() if v),
        record("batch_latency", "ms", walls, bench.where, better="less", parameters=parameters),
    ]


async def at_once(bench: Bench, asked: list[Talk], tell: Callable[[str], None]) -> list[Record]:
    """Send all requests together; the server decides how many of them run simultaneously."""
    tell(f"{len(asked)} requests sent at once")
    run = await drive(bench.target, asked, Pace(), each=counted(len(asked), tell))
    shape: dict[str, float | str] = {"requests": len(asked)}
    return records(Report(run, bench.where, Pace(), shape))


def counted(total: int, tell: Callable[[str], None]) -> Callable[[], None]:
    """Return a function to call after each of `total` requests; it tells of each twentieth."""
    done, every = 0, max(1, total // TOLD)

    def count() -> None:
        nonlocal done
        done += 1
        if done % every == 0:
            tell(f"{done} of {total} requests")

    return count


async def _warm_up(bench: Bench) -> None:
    rng = random.Random(0)
    for _ in range(2):
        await complete(bench.target, bench.prompt(rng, 64), 8)


async def _decode(bench: Bench, tell: Callable[[str], None]) -> Record:
    """Measure the decode rate at batch 1; its limit is bandwidth / weight bytes per token."""
    rng = random.Random(2)
    rates, roofs = [], []
    for _ in range(bench.rounds):
        bandwidth = _probe(bench, lambda r: r.bandwidth())
        prompt = bench.prompt(rng, DECODE_PROMPT_TOKENS)
        timing = await complete(bench.target, prompt, bench.output_tokens)
        rates.append(timing.decode_rate)
        _tell_round(bench, rates, tell)
        roofs.append(_ratio(bandwidth, bench.work.weight_bytes_per_token))
    return record(
        "decode_batch_1",
        "tokens/s",
        rates,
        bench.where,
        better="more",
        roofs=roofs,
        of="read bandwidth",
        parameters={"output_tokens": bench.output_tokens},
        facts={"weight_bytes_per_token": bench.work.weight_bytes_per_token},
    )


async def _prefill(bench: Bench, tell: Callable[[str], None]) -> list[Record]:
    """Measure prefill rate and TTFT; their limit is the dot-product rate / (2 x linear weights)."""
    rng = random.Random(3)
    rates, times, roofs = [], [], []
    for _ in range(bench.rounds):
        peak = _probe(bench, lambda r: r.dot(bench.work.dot))
        timing = await complete(bench.target, bench.prompt(rng, bench.prompt_tokens), 1)
        times.append(1e3 * timing.ttft)
        rates.append(bench.prompt_tokens / timing.ttft)
        _tell_round(bench, rates, tell)
        roofs.append(_ratio(peak, 2 * bench.work.linear_weights))
    shape: dict[str, float | str] = {"prompt_tokens": bench.prompt_tokens}
    return [
        record(
            "prefill",
            "tokens/s",
            rates,
            bench.where,
            better="more",
            roofs=roofs,
            of=f"{bench.work.dot} dot peak",
            parameters=shape,
            facts={"linear_weights": bench.work.linear_weights},
        ),
        record("ttft", "ms", times, bench.where, better="less", parameters=shape),
    ]


async def _together(bench: Bench, tell: Callable[[str], None]) -> list[Record]:
    """Measure the output tokens per second of `concurrency` simultaneous requests."""
    rng = random.Random(4)
    rates, gaps = [], []
    for _ in range(bench.rounds):
        prompts = [bench.prompt(rng, DECODE_PROMPT_TOKENS) for _ in range(bench.concurrency)]
        jobs = [partial(complete, bench.target, p, bench.output_tokens) for p in prompts]
        timings, wall = await run_closed(jobs, bench.concurrency)
        rates.append(sum(t.tokens for t in timings) / wall)
        _tell_round(bench, rates, tell)
        gaps.append(1e3 * percentile([t.tpot for t in timings], 50))
    shape: dict[str, float | str] = {
        "concurrency": bench.concurrency,
        "output_tokens": bench.output_tokens,
    }
    name, where = f"{bench.concurrency}_requests", bench.where
    return [
        record(f"output_{name}", "tokens/s", rates, where, better="more", parameters=shape),
        record(f"tpot_{name}", "ms", gaps, where, better="less", parameters=shape),
    ]


def _tell_round(bench: Bench, rates: Sequence[float], tell: Callable[[str], None]) -> None:
    tell(f"  {len(rates)} of {bench.rounds}: {rates[-1]:.1f} tokens/s")


def _probe(bench: Bench, measure: Callable[[Roofline], float]) -> float:
    return 0.0 if bench.roofline is None else measure(bench.roofline)


def _ratio(roof: float, cost: int) -> float:
    return roof / cost if cost else 0.0


def run(measuring: Coroutine[Any, Any, list[Record]]) -> list[Record]:
    """Run a measurement coroutine of this module, and return its records."""
    return asyncio.run(measuring)
