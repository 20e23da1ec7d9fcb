#!/usr/bin/env python3
"""Scheduling time with waiting requests: medians and 95th percentiles in ms. No model runs.

usage: bench_schedule.py [--waiting 32] [--tokens 131072] [--rounds 30]

Each step decodes one stream and computes a chunk of one long prompt, which uses up the token
budget. `schedule_alone` is the time of `schedule()` in such a step. `schedule_waiting` is the time
while --waiting further prompts wait. Each has --tokens tokens, 15/16 of them in the prefix cache,
and enough slots and blocks are free for all. `schedule_windows` is the same for a model with one
full and five sliding-window cache groups. `arrival` is the time of a new prompt on the engine
thread: from its message to the first search in the prefix cache. `index_slice` is the time, between
two steps, for a part of the index of n-grams of such a prompt, in CPU time, and `index_longest` for
the longest part of each prompt; a prompt from the prefix cache is indexed in the same parts.

The other lines are parts of a decode step of many streams: `schedule()`, `pack()`,
and `step()` of the native executor, which checks the step and runs a model of one embedding.
They are measured at a long and at a short context, so the difference is the cost
of long block tables. `64x32k` means 64 streams of 32k tokens with one cache group;
`8x128k` has one full and five sliding-window groups, as in Gemma 3.
"""

import argparse
import sys
import time
from array import array

import numpy as np

from cpuserve import _C
from cpuserve.bench.schema import percentile
from cpuserve.config.cache_groups import CacheUse
from cpuserve.core.kv.manager import KvManager
from cpuserve.core.request import Request
from cpuserve.core.scheduler import Scheduler
from cpuserve.core.speculation.ngram_drafts import NgramDrafts
from cpuserve.core.step import RowResult
from cpuserve.runtime.executor import StepOutputs
from cpuserve.runtime.pack import pack, unpack
from cpuserve.sampling.params import SamplingParams

BLOCK = 32
BUDGET = 2048


class NoSlots:
    """The SlotHost of a scheduler without an executor: it has no sampler state."""

    def admit(self, *_):
        """Do nothing: there is no sampler state to create."""

    def release(self, _slot):
        """Do nothing: there is no sampler state to free."""


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
    rest = (steps + 8) * BUDGET  # uncached tokens of a waiting prompt: more than the running one
    scheduler = make(windows, cached + rest, waiting)
    first = request(0, text[:cached], 1)
    scheduler.add(first)
    while scheduler.requests:  # the blocks of finished requests stay cached
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
    """Return the seconds of the engine thread for each of `rounds` prompts that arrive."""
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
        del one, prompt  # a request is freed at its end, not when the next one arrives
    return seconds


def index_slices(tokens, rounds):
    """Return the CPU seconds of each part of the index of `rounds` prompts: a list for each."""
    shared, found = _C.NgramChances(), []
    for number in range(rounds):
        one = request(number, [(i * 7919 + number) % 50_021 for i in range(tokens)], 9)
        source = NgramDrafts(lambda size: _C.NgramIndex(2, 4, shared, size), 2 * tokens)
        found.append([])
        while (text := source.texts.get(one.id)) is None or text.tokens < tokens:
            began = time.thread_time()
            source.begin()
            source.propose(one, 7)
            found[-1].append(time.thread_time() - began)
    return found


class OneEmbedding:
    """A native executor of the smallest model with cache groups; call it inside `team.run`."""

    def __init__(self, team, groups, num_seqs, num_blocks):
        program = _C.Program(_C.isa_levels()[-1], num_seqs, num_seqs)
        x = program.value("x", 32, "f32")
        embed = program.matrix("embed", "dense_f32", 8, 32, [8], False)
        program.embed(x, embed, 1.0)
        for group in range(groups):
            program.kv_layer(1, 16, group)
        program.logits(x, embed, -1, 1.0, 0.0)
        self.native = _C.Executor(team, program, num_blocks, "bf16", num_seqs, 5)
        rows = np.ones((8, 32), np.float32).view(np.uint8)
        self.native.load_matrix(embed, [(rows, "f32", None)])

    def admit(self, slot, request):
        self.native.admit(slot, request)

    def release(self, slot):
        self.native.release(slot)

    def step(self, arrays):
        n = self.native
        n.step(arrays.words)
        return StepOutputs(n.tokens, n.logprobs, n.ranks, n.top_ids, n.top_logprobs)


def decode_seconds(team, windows, streams, tokens, rounds):
    """Return the seconds of (schedule, pack, execute) of decode steps at `tokens` of context."""
    need = (tokens + rounds) // BLOCK + 3
    spans = [min(need, (w + BUDGET) // BLOCK + 3) if w else need for w in windows]
    blocks = streams * sum(spans)
    kv = KvManager(blocks, BLOCK, prefix_caching=False, use=CacheUse(windows, BUDGET, BLOCK))
    executor = OneEmbedding(team, len(windows), streams, blocks + 1)
    # All prompts run at once, so that no stream decodes before the others can.
    budget = streams * tokens
    scheduler = Scheduler(kv, executor, max_num_seqs=streams, max_num_batched_tokens=budget)
    for number in range(streams):
        scheduler.add(request(number, [1] * tokens))
    while any(r.num_computed < tokens for r in scheduler.requests.values()):
        scheduler.update(results(scheduler.schedule()))
    parts = [], [], []
    for _ in range(rounds):
        times = [time.perf_counter()]
        batch = scheduler.schedule()
        times.append(time.perf_counter())
        arrays = pack(batch)
        times.append(time.perf_counter())
        outputs = executor.step(arrays)
        times.append(time.perf_counter())
        scheduler.update(unpack(outputs, arrays.tops))
        for part, begin, end in zip(parts, times, times[1:], strict=False):
            part.append(end - begin)
    return [part[3:] for part in parts]


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
    slices = index_slices(flags.tokens, flags.rounds)
    write("index_slice", [seconds for each in slices for seconds in each])
    write("index_longest", [max(each) for each in slices])

    def decode(name, windows, streams, tokens):
        team = _C.Team(1)
        parts = []
        team.run(lambda: parts.extend(decode_seconds(team, windows, streams, tokens, 200)))
        for part, seconds in zip(("schedule", "pack", "execute"), parts, strict=True):
            write(f"{part}_{name}", seconds)
        write(f"all_{name}", [sum(each) for each in zip(*parts, strict=True)])

    for streams, windows, tokens in ((64, (0,), 32768), (8, (0, *[1024] * 5), 131072)):
        decode(f"{streams}x{tokens // 1024}k", windows, streams, tokens)
        decode(f"{streams}x64", windows, streams, 64)


if __name__ == "__main__":
    sys.exit(main())
