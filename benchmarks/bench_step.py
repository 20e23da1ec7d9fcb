#!/usr/bin/env python3
"""Seconds of one engine step without HTTP, by batch size and context; JSON lines.

usage: bench_step.py MODEL [--batch 1 8 32] [--context 128 1024] [--prefill 512 1024]
                     [--leave 2048] [--rounds 30]

Steps run as in the server (scheduler, packing, executor, update); "python" is what a step takes
outside the executor. The rates "decode" and "prefill" are fractions of a probe on the engine's own
threads and weights right before: reading every weight once a step, multiplying each once a token
(--dot int8 where the weights are quantized). Further options are those of `cpuserve serve`.
"""

import argparse
import random
import sys
import threading
import time
from array import array

from cpuserve.bench.schema import Where, record
from cpuserve.config.load import from_arguments
from cpuserve.engine.core import build_engine, run_engine
from cpuserve.engine.ipc import Abort, AddRequest
from cpuserve.entrypoints.prepare import prepare
from cpuserve.sampling.params import SamplingParams

PROBE_S = 0.1
STEPS_A_PROBE = 10


class TimedExecutor:
    """Passes everything on and adds up the time spent in `step`."""

    def __init__(self, executor):
        self._executor = executor
        self.seconds = 0.0

    def __getattr__(self, name):
        return getattr(self._executor, name)

    def step(self, arrays):
        started = time.perf_counter()
        try:
            return self._executor.step(arrays)
        finally:
            self.seconds += time.perf_counter() - started


class Bench:
    """An engine on this thread."""

    def __init__(self, core, where, vocab, rounds, dot):
        self.core, self.where, self.rounds = core, where, rounds
        self.native, self.lowered, self.dot = core.executor.native, core.executor.lowered, dot
        self.core.executor = self.timed = TimedExecutor(core.executor)
        self.vocab, self.rng, self.next_id = vocab, random.Random(0), 0

    def add(self, tokens, max_tokens):
        """Queue a request with a random prompt; its id."""
        self.next_id += 1
        top = min(self.vocab, 40000)
        prompt = array("i", (self.rng.randrange(min(300, top - 1), top) for _ in range(tokens)))
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        self.core.handle(AddRequest(self.next_id, prompt.tobytes(), params, time.monotonic()))
        return self.next_id

    def step(self):
        """(seconds of a whole step, seconds of it in the executor)."""
        self.timed.seconds = 0.0
        started = time.perf_counter()
        self.core.step()
        return time.perf_counter() - started, self.timed.seconds

    def drain(self):
        while self.core.has_work:
            self.core.step()

    def decode(self, batch, context):
        """Steps of `batch` sequences that have `context` keys each."""
        most = self.rounds + batch * (8 + context // 8)  # others decode while one is prefilled
        ids = [self.add(context, most) for _ in range(batch)]
        while self.core.stats.running < batch or self.core.scheduler.waiting or self.prefilling():
            self.core.step()
        samples, roofs = [], []
        for i in range(self.rounds):
            if i % STEPS_A_PROBE == 0:
                steps = self.native.probe_bandwidth(PROBE_S) / self.lowered.read_bytes
            samples.append(self.step())
            roofs.append(batch * steps)
        self.core.handle(Abort(ids))
        self.drain()
        parameters = {"batch": batch, "context": context}
        self.show("decode_step", samples, parameters)
        self.rate("decode", batch, samples, roofs, "read bandwidth", parameters)

    def prefilling(self):
        """Whether a prompt is not yet computed."""
        return any(r.num_output == 0 for r in self.core.scheduler.running)

    def prefill(self, tokens):
        """One prompt alone; several steps where it is longer than a step."""
        samples, roofs = [], []
        for _ in range(max(1, self.rounds // 5)):
            peak = self.native.probe_dot(self.dot, PROBE_S)
            roofs.append(peak / (2 * self.lowered.linear_weights))
            self.add(tokens, 1)
            whole = inside = 0.0
            while self.core.has_work:
                a, b = self.step()
                whole, inside = whole + a, inside + b
            samples.append((whole, inside))
        self.show("prefill", samples, {"tokens": tokens})
        self.rate("prefill", tokens, samples, roofs, f"{self.dot} dot peak", {"tokens": tokens})

    def leave(self, tokens):
        """From an abort that arrives somewhere in a prompt alone in its step to an idle engine."""
        samples = []
        for _ in range(self.rounds):
            self.add(tokens, 1)  # the time that a whole step of it takes
            whole = self.step()[0]
            self.drain()
            number = self.add(tokens, 1)
            message, seen = Abort([number]), []

            def arrive(message=message, seen=seen):
                seen.append(time.perf_counter())
                self.core.interrupt.see(message)

            timer = threading.Timer(self.rng.uniform(0.05, 0.95) * whole, arrive)
            timer.start()
            self.core.step()
            timer.join()
            self.core.handle(message)
            assert not self.core.has_work
            samples.append((time.perf_counter() - seen[0], 0.0))
        self.show("leave", samples, {"tokens": tokens})

    def rate(self, name, tokens, samples, roofs, of, parameters):
        rates = [tokens / whole for whole, _ in samples]
        found = record(
            f"{name}_rate", "tokens/s", rates, self.where, roofs=roofs, of=of, parameters=parameters
        )
        print(found.to_json(), flush=True)

    def show(self, name, samples, parameters):
        total = [1e3 * whole for whole, _ in samples]
        python = [1e6 * (whole - inside) for whole, inside in samples]
        print(record(name, "ms", total, self.where, parameters=parameters).to_json(), flush=True)
        if name == "leave":
            return
        found = record(f"{name}_python", "us", python, self.where, parameters=parameters)
        print(found.to_json(), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--context", type=int, nargs="*", default=[128, 1024])
    parser.add_argument("--prefill", type=int, nargs="*", default=[512, 1024])
    parser.add_argument("--leave", type=int, nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--dot", choices=("f32", "bf16", "int8"), default="bf16")
    args, more = parser.parse_known_args()
    options = dict(flag.lstrip("-").split("=", 1) for flag in more)
    prepared = prepare(from_arguments({"model": args.model, **options}))
    config = prepared.resolved.config
    where = Where(
        host=prepared.host.cpu_model, isa=config.isa, threads=config.threads, model=config.model
    )

    def run(team):
        core = build_engine(config, None, team)
        bench = Bench(core, where, prepared.spec.vocab, args.rounds, args.dot)
        bench.prefill(64)
        for tokens in args.prefill:
            bench.prefill(tokens)
        for tokens in args.leave:
            bench.leave(tokens)
        for batch in args.batch:
            for context in args.context:
                bench.decode(batch, context)
        core.close()

    run_engine(config, run)
    return 0


if __name__ == "__main__":
    sys.exit(main())
