#!/usr/bin/env python3
"""Scheduling time with waiting requests: medians and 95th percentiles in ms. No model runs.

usage: bench_schedule.py [--waiting 32] [--tokens 131072] [--rounds 30]

Each step decodes one stream and computes a chunk of one long prompt, which uses up the token
budget. `schedule_alone` is the time of `schedule()` in such a step. `schedule_waiting` is the time
while --waiting further prompts wait. Each has --tokens tokens, 15/16 of them in the prefix cache,
and enough slots and blocks are free for all. `schedule_windows` is the same for a model with one
full and five sliding-window cache groups. `arrival` is the time of a new prompt on the engine
thread: from its message to the first search in the prefix cache.
"""

import argparse
import sys
import time
from array import array

import numpy as np

from cpuserve.bench.schema import percentile
from cpuserve.config.cache_groups import CacheUse
from cpuserve.core.kv.manager import KvManager
from cpuserve.core.request import Request
from cpuserve.core.scheduler import Scheduler
from cpuserve.core.step import RowResult
from cpuserve.sampling.params import SamplingParams

BLOCK = 32
BUDGET = 2048


class NoSlots:
    """A SlotHost that keeps nothing."""

    def admit(self, *_):
        """Keep nothing."""

    def release(self, _slot):
        """Keep nothing."""


def request(number, prompt, max_tokens=1 << 20):
    params = SamplingParams(max_tokens=max_tokens)
    return Request(number, prompt, params, max_tokens, seed=number)


def results(batch):
    return [RowResult(1) for chunk in batch.chunks for _ in chunk.rows]


def step_seconds(scheduler, rounds):
    """Run `rounds` steps; return the seconds of each `schedule()`."""
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        batch = scheduler.schedule()
        seconds.append(time.perf_counter() - began)
        scheduler.update(results(batch))
    return seconds


def make(windows, tokens, waiting):
    blocks = len(windows) * (waiting + 4) * (tokens // BLOCK + 64)
    kv = KvManager(blocks, BLOCK, use=CacheUse(windows, BUDGET, BLOCK))
    return Scheduler(kv, NoSlots(), max_num_seqs=waiting + 4, max_num_batched_tokens=BUDGET)


def measure(windows, tokens, waiting, rounds):
    """Return the seconds of each `schedule()`: (without, with) waiting prompts."""
    steps = 2 * (rounds + 3)
    text, cached = list(range(tokens)), tokens * 15 // 16
    rest = (steps + 8) * BUDGET  # of each waiting prompt, more than of the one that runs
    scheduler = make(windows, cached + rest, waiting)
    first = request(0, text[:cached], 1)
    scheduler.add(first)
    while scheduler.requests:  # its blocks stay cached
        scheduler.update(results(scheduler.schedule()))
    scheduler.add(request(1, [7]))
    scheduler.add(request(2, list(range(1, (steps + 4) * BUDGET))))
    step_seconds(scheduler, 3)
    alone = step_seconds(scheduler, rounds)
    for number in range(3, waiting + 3):
        scheduler.add(request(number, text[:cached] + [number + 1000] * rest))
    step_seconds(scheduler, 3)
    beside = step_seconds(scheduler, rounds)
    assert sum(r.is_running for r in scheduler.requests.values()) == 2, "a waiting prompt began"
    return alone, beside


def arrival(tokens, rounds):
    """Return seconds of the engine's thread for a prompt that arrives."""
    from cpuserve.core.admission import Limits, check_request

    scheduler = make((0,), tokens, 4)
    seconds = []
    for number in range(rounds):
        body = array("i", range(number, tokens + number)).tobytes()
        params = SamplingParams(max_tokens=1)
        limits = Limits(tokens + 1, tokens + 1, 1 << 20)
        began = time.perf_counter()
        ids = np.frombuffer(body, np.int32)
        prompt = ids.tolist()
        check_request(ids, params, limits)
        one = request(number, prompt, 1)
        scheduler.kv.num_cached_tokens(one.chain, prompt)
        seconds.append(time.perf_counter() - began)
    return seconds


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--waiting", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--rounds", type=int, default=30)
    flags = parser.parse_args()

    def write(metric, seconds):
        median, most = (1e3 * percentile(seconds, share) for share in (50, 95))
        print(f"{metric:<24} {median:9.3f} {most:9.3f}", flush=True)

    alone, beside = measure((0,), flags.tokens, flags.waiting, flags.rounds)
    write("schedule_alone", alone)
    write("schedule_waiting", beside)
    alone, beside = measure((0, *[1024] * 5), flags.tokens, flags.waiting, flags.rounds)
    write("schedule_windows_alone", alone)
    write("schedule_windows", beside)
    write("arrival", arrival(flags.tokens, flags.rounds))


if __name__ == "__main__":
    sys.exit(main())
