"""`cpuserve bench step` and `kernels`: measure engine steps in this process, without HTTP.

Steps run as in the server: scheduler, packing, executor, update. There are three kinds of records:
rates of whole steps, times of each kernel, and overheads (all work except matrix arithmetic).
"""

from __future__ import annotations

import random
import threading
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from cpuserve.base.errors import CpuserveError
from cpuserve.bench.plan import (
    OVERHEAD_CONTEXT,
    OVERHEAD_STEPS,
    Capacity,
    Plan,
    check_plan,
    overhead_batches,
)
from cpuserve.bench.schema import Record, Where, percentile, record
from cpuserve.bench.workload import plain_ids
from cpuserve.engine.build import build_engine, run_engine
from cpuserve.engine.core import EngineCore
from cpuserve.engine.ipc import Abort, AddRequest
from cpuserve.platforms.cpu import CpuPlatform
from cpuserve.sampling.params import SamplingParams

if TYPE_CHECKING:
    from cpuserve.config.engine import EngineConfig
    from cpuserve.program.loads import OpWeights

PROBE_S = 0.1
STEPS_A_PROBE = 10
PROFILED_STEPS = 10  # the number of decode steps in each round of `kernels`
BARRIERS = 2000
WARM_UP_TOKENS = 64
TOP_P_VOCAB = 151936  # the vocabulary size of Qwen models
DRAWS = 100
MATRIX_OPS = ("linear", "attention", "logits")  # "logits" includes lm_head and sampling

What = Literal["rates", "kernels", "overheads"]
Emit = Callable[[Record], None]
Pair = tuple[float, float]  # (seconds of a whole step, seconds in the executor)


def step_records(
    config: EngineConfig,
    vocab: int,
    where: Where,
    plan: Plan,
    what: What,
    cache: CacheSizes,
    emit: Emit,
    tell: Callable[[str], None],
) -> None:
    """Build an engine, and call emit(record) for each result of the kind `what`.

    tell: gets a text before each part of the work: its name, and how long it will take.

    Raises:
        ConfigError: the plan exceeds a limit of the model or of the engine.
        CpuserveError: the engine refused a request, or could not run all requests together.
    """
    steps = PROFILED_STEPS if what == "kernels" else 1
    check_plan(config, replace(plan, rounds=plan.rounds * steps), what == "overheads")
    # No client reads tokens here, so prompt chunks need not be short to protect latencies.
    config = msgspec.structs.replace(config, itl_target_ms=0)

    def run(team: Any) -> None:
        tell(f"loading {config.model}")
        core = build_engine(config, None, team)
        bench = StepBench(core, where, vocab, plan.rounds, plan.dot, cache, emit, tell)
        bench.run_prompt(min(WARM_UP_TOKENS, Capacity.of(config).longest_prompt))
        if what == "overheads":
            bench.overheads()
        elif what == "kernels":
            bench.kernels(plan)
        else:
            bench.all_of(plan)
        core.close()

    run_engine(config, run)


class CacheSizes(NamedTuple):
    """Byte counts of the model's cache.

    token: bytes of a token in each layer of the KV cache.
    states: bytes of the recurrent states of a sequence.
    """

    token: Sequence[int]
    states: int


class TimedExecutor:
    """Wraps an executor, and sums the time that is spent in its `step`."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        """Return a member of the wrapped executor, except `step` and `seconds`."""
        return getattr(self._executor, name)

    def step(self, arrays: Any) -> Any:
        """Run a step of the executor, and add its time to `seconds`."""
        started = time.perf_counter()
        try:
            return self._executor.step(arrays)
        finally:
            self.seconds += time.perf_counter() - started


class StepBench:
    """Measures an engine with a native executor on this thread; passes each record to `emit`."""

    def __init__(
        self,
        core: EngineCore,
        where: Where,
        vocab: int,
        rounds: int,
        dot: str,
        cache: CacheSizes,
        emit: Emit,
        tell: Callable[[str], None],
    ) -> None:
        executor: Any = core.executor
        self.core, self.where, self.rounds, self.emit = core, where, rounds, emit
        self.tell, self.forecast = tell, Forecast()
        self.native, self.lowered = executor.native, executor.lowered
        self.dot, self.cache = dot or self.lowered.dot, cache
        self.core.executor = self.timed = TimedExecutor(executor)
        self.vocab, self.rng, self.next_id = vocab, random.Random(0), 0

    def all_of(self, plan: Plan) -> None:
        """Measure all sizes of the plan: prompts, then aborted prompts, then decode steps."""
        prompts = self._prompt_rounds() * sum(plan.prompts) + 2 * self.rounds * sum(plan.leaves)
        contexts = sum(b * c for b in plan.batches for c in plan.contexts)
        steps = self.rounds * len(plan.contexts) * sum(map(self._step_seconds, plan.batches))
        total = self.forecast.prompt(prompts + contexts) + steps
        self.tell(f"all measurements: {told_seconds(total)}")
        for tokens in plan.prompts:
            self.prefill(tokens)
        for tokens in plan.leaves:
            self.leave(tokens)
        for batch in plan.batches:
            for context in plan.contexts:
                self.decode(batch, context)

    # --- rates of whole steps -----------------------------------------------------------------

    def decode(self, batch: int, context: int) -> None:
        """Measure decode steps of `batch` sequences with `context` keys each.

        The upper bound is batch * bandwidth / bytes per step. A step reads the weights,
        and the keys, values and recurrent states of each sequence.
        """
        sequence = self.lowered.cache_bytes(context, self.cache.token) + self.cache.states
        read = self.lowered.step_bytes(batch) + batch * sequence
        steps_s = self.rounds * self._step_seconds(batch)
        self._tell_decode(batch, context, self.rounds, steps_s)
        ids = self.start(batch, context, self.rounds)
        samples: list[Pair] = []
        roofs: list[float] = []
        steps = 0.0
        for i in range(self.rounds):
            if i % STEPS_A_PROBE == 0:
                steps = self.native.probe_bandwidth(PROBE_S) / read
            samples.append(self.step(all_stay=True))
            roofs.append(batch * steps)
        self.stop(ids)
        shape = {"batch": batch, "context": context}
        self.show("decode_step", samples, shape)
        self.rate("decode", batch, samples, roofs, "reading weights and caches", shape)

    def prefill(self, tokens: int) -> None:
        """Measure a single prompt, which takes several steps if it is longer than a chunk."""
        samples, roofs = [], []
        rounds = self._prompt_rounds()
        seconds = told_seconds(rounds * self.forecast.prompt(tokens))
        self.tell(f"{rounds} x a prompt of {tokens} tokens: {seconds}")
        for _ in range(rounds):
            peak = self.native.probe_dot(self.dot, PROBE_S)
            roofs.append(peak / (2 * self.lowered.linear_weights))
            samples.append(self.run_prompt(tokens))
        self.show("prefill", samples, {"tokens": tokens})
        self.rate("prefill", tokens, samples, roofs, f"{self.dot} dot peak", {"tokens": tokens})

    def leave(self, tokens: int) -> None:
        """Measure how long a step continues after its prompt was aborted at a random moment."""
        samples = []
        seconds = told_seconds(2 * self.rounds * self.forecast.prompt(tokens))
        self.tell(f"{self.rounds} x an aborted prompt of {tokens} tokens: {seconds}")
        for _ in range(self.rounds):
            self.add(tokens, 1)  # run one prompt without abort to time a whole step
            whole = self.step()[0]
            self.drain()
            message, seen = Abort([self.add(tokens, 1)]), [0.0]

            def arrive(message: Abort = message, seen: list[float] = seen) -> None:
                seen[0] = time.perf_counter()
                self.core.interrupt.see(message)

            timer = threading.Timer(self.rng.uniform(0.05, 0.95) * whole, arrive)
            timer.start()
            self._advance()
            timer.join()
            self.core.handle(message)
            assert not self.core.has_work
            samples.append(1e3 * (time.perf_counter() - seen[0]))
        self.cost("leave", "ms", samples, {"tokens": tokens})

    def _prompt_rounds(self) -> int:
        return max(1, self.rounds // 5)

    def _step_seconds(self, batch: int) -> float:
        """Return about how long a decode step of `batch` sequences takes: at least a read."""
        bandwidth: float = self.native.probe_bandwidth(0.0)
        reading = float(self.lowered.step_bytes(batch)) / bandwidth
        return max(self.forecast.prompt(batch), reading)

    def _tell_decode(self, batch: int, context: int, steps: int, steps_s: float) -> None:
        """Announce the next measurement, and how long its prompts and its steps will take."""
        prompts = told_seconds(self.forecast.prompt(batch * context))
        who = "1 sequence" if batch == 1 else f"{batch} sequences"
        self.tell(
            f"{who} of {context} tokens: {prompts} for prompts, "
            f"then {steps} decode steps in {told_seconds(steps_s)}"
        )

    # --- rates and times of single operations -------------------------------------------------

    def kernels(self, plan: Plan) -> None:
        """Measure the rate of each matrix against its limit, and the time of other operations."""
        for tokens in plan.prompts:
            self._prompt_kernels(tokens)
        for batch in plan.batches:
            for context in plan.contexts:
                self._decode_kernels(batch, context)

    def _prompt_kernels(self, tokens: int) -> None:
        """Measure a prompt's kernels: operations per second, as a share of the dot-product rate."""
        found: dict[str, list[float]] = {}
        roofs = []
        seconds_all = told_seconds(self.rounds * self.forecast.prompt(tokens))
        self.tell(f"{self.rounds} x the operations of a prompt of {tokens} tokens: {seconds_all}")
        for _ in range(self.rounds):
            roofs.append(self.native.probe_dot(self.dot, PROBE_S) / 1e9)
            self._profiled(found, 1, lambda: self.run_prompt(tokens))
        for name, seconds in found.items():
            shape: dict[str, float | str] = {"kernel": name, "tokens": tokens}
            weights = sum(w.n * w.k for w in self._weights_of(name))
            # Logits are computed only for the last token of the prompt,
            # so bandwidth limits their speed, and not the dot-product rate.
            if weights and not name.startswith("logits"):
                rates = [2e-9 * tokens * weights / s for s in seconds]
                self._kernel("GOP/s", rates, roofs, f"{self.dot} dot peak", shape, seconds)
            else:
                self.cost("kernel_time", "us", [1e6 * s for s in seconds], shape)

    def _decode_kernels(self, batch: int, context: int) -> None:
        """Measure operations of decode steps: weight bytes per second, as a share of bandwidth."""
        found: dict[str, list[float]] = {}
        roofs = []
        steps = PROFILED_STEPS * self.rounds
        self._tell_decode(batch, context, steps, steps * self._step_seconds(batch))
        ids = self.start(batch, context, steps)
        for _ in range(self.rounds):
            roofs.append(self.native.probe_bandwidth(PROBE_S) / 1e9)
            self._profiled(found, PROFILED_STEPS, lambda: self.step(all_stay=True))
        self.stop(ids)
        for name, seconds in found.items():
            shape: dict[str, float | str] = {"kernel": name, "batch": batch, "context": context}
            read = sum(w.read_bytes(batch) for w in self._weights_of(name))
            if read:
                rates = [1e-9 * read / s for s in seconds]
                self._kernel("GB/s", rates, roofs, "read bandwidth", shape, seconds)
            else:
                self.cost("kernel_time", "us", [1e6 * s for s in seconds], shape)

    def _profiled(
        self, found: dict[str, list[float]], count: int, run: Callable[[], object]
    ) -> None:
        """Call run() `count` times; append the seconds of each kernel per call to found[kernel]."""
        self.native.profile(True)
        before = self.native.op_times()
        for _ in range(count):
            run()
        spent = (self.native.op_times() - before) / count
        self.native.profile(False)
        total: dict[str, float] = {}
        for index, seconds in enumerate(spent):
            name = self._kernel_name(index)
            total[name] = total.get(name, 0.0) + float(seconds)
        for name, seconds in total.items():
            found.setdefault(name, []).append(seconds)

    def _kernel_name(self, index: int) -> str:
        """Return the name of an operation, with the kind and shape of its matrix if it has one.

        The times of operations with equal names are summed.
        """
        name, weights = str(self.native.op_name(index)), self.lowered.op_weights[index]
        return name if weights is None else f"{name} {weights.kind} {weights.n}x{weights.k}"

    def _weights_of(self, kernel: str) -> list[OpWeights]:
        return [
            weights
            for index, weights in enumerate(self.lowered.op_weights)
            if weights is not None and self._kernel_name(index) == kernel
        ]

    def _kernel(
        self,
        unit: str,
        rates: Sequence[float],
        roofs: Sequence[float],
        of: str,
        shape: Mapping[str, float | str],
        seconds: Sequence[float],
    ) -> None:
        facts = {"us": round(1e6 * percentile(seconds, 50), 1)}
        found = record(
            "kernel_rate",
            unit,
            rates,
            self.where,
            better="more",
            roofs=roofs,
            of=of,
            parameters=shape,
            facts=facts,
        )
        self.emit(found)

    # --- overheads: all work besides matrices and attention -----------------------------------

    def overheads(self) -> None:
        """Measure the barrier, operations without a matrix, Python code and memory allocations."""
        batches = overhead_batches(self.core.config)
        seconds = 2 * OVERHEAD_STEPS * self.rounds * sum(map(self._step_seconds, batches))
        self.tell(f"barriers, then decode steps of {batches} sequences: {told_seconds(seconds)}")
        barriers = [1e6 * self.native.probe_barrier(BARRIERS) for _ in range(self.rounds)]
        self.cost("barrier", "us", barriers, {})
        allocated = self.native.step_allocations
        for batch in overhead_batches(self.core.config):
            self._overheads(batch)
        count = self.native.step_allocations - allocated
        self.cost("step_allocations", "count", [count], {})
        draws = CpuPlatform().sampling_seconds(self.where.isa, TOP_P_VOCAB, DRAWS)
        times = [1e6 * s for s in draws]
        self.cost("sample_top_p", "us", times, {"vocab": TOP_P_VOCAB, "top_p": 0.9})

    def _overheads(self, batch: int) -> None:
        """Alternate plain steps, which time Python, and profiled steps, which time operations."""
        ids = self.start(batch, OVERHEAD_CONTEXT, 2 * OVERHEAD_STEPS * self.rounds)
        python: list[float] = []
        outside: list[float] = []
        for _ in range(self.rounds):
            plain = [self.step(all_stay=True) for _ in range(OVERHEAD_STEPS)]
            python += [1e6 * (whole - inside) for whole, inside in plain]
            outside.append(1e6 * self._outside() / max(1, self._layers()))
        self.stop(ids)
        shape = {"batch": batch, "context": OVERHEAD_CONTEXT, "layers": self._layers()}
        self.cost("python_step", "us", python, shape)
        self.cost("outside_matrices", "us/layer", outside, shape)

    def _outside(self) -> float:
        """Return seconds per step in the executor outside of linear, attention and logits."""
        self.native.profile(True)
        before = self.native.op_times()
        inside = sum(self.step(all_stay=True)[1] for _ in range(OVERHEAD_STEPS))
        spent = self.native.op_times() - before
        self.native.profile(False)
        names = [self.native.op_name(i) for i in range(self.native.num_ops())]
        in_matrices = sum(s for name, s in zip(names, spent, strict=True) if name in MATRIX_OPS)
        return float(inside - in_matrices) / OVERHEAD_STEPS

    def _layers(self) -> int:
        names = (self.native.op_name(i) for i in range(self.native.num_ops()))
        return sum(name == "attention" for name in names)

    # --- requests and steps of the engine -----------------------------------------------------

    def start(self, batch: int, context: int, steps: int) -> list[int]:
        """Start `batch` requests that can decode `steps` steps; return their ids after prefill."""
        tokens = Capacity.of(self.core.config).output(batch, context, steps)
        ids = [self.add(context, tokens) for _ in range(batch)]
        began = time.perf_counter()
        while self.core.stats.running < batch or self.core.scheduler.waiting or self.prefilling():
            self._advance(all_stay=True)
        self.forecast.saw_prompt(batch * context, time.perf_counter() - began)
        return ids

    def stop(self, ids: list[int]) -> None:
        """Abort the requests with these ids, and wait until they have ended."""
        self.core.handle(Abort(ids))
        self.drain()

    def add(self, tokens: int, max_tokens: int) -> int:
        """Queue a request with a random prompt of `tokens` tokens, and return its id."""
        self.next_id += 1
        prompt = array("i", plain_ids(self.rng, tokens, self.vocab))
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        self.core.handle(AddRequest(self.next_id, prompt.tobytes(), params, time.monotonic()))
        return self.next_id

    def step(self, *, all_stay: bool = False) -> Pair:
        """Run one step, and return (its seconds, the seconds in the executor).

        all_stay: raise CpuserveError if a sequence ends or is preempted.
        """
        self.timed.seconds = 0.0
        return self._advance(all_stay=all_stay), self.timed.seconds

    def _advance(self, *, all_stay: bool = False) -> float:
        """Run one step and check its outputs; return only the seconds of the step."""
        started = time.perf_counter()
        outputs = self.core.step().outputs
        seconds = time.perf_counter() - started
        failed = next((o.error for o in outputs if o.finish == "error"), None)
        if failed is not None:
            msg = f"the engine refused a request of the benchmark: {failed}"
            raise CpuserveError(msg)
        if all_stay and (self.core.stats.preemptions or any(o.finish for o in outputs)):
            msg = (
                "a sequence ended or was preempted during the measurement; "
                "lower --batch, --context or --rounds"
            )
            raise CpuserveError(msg)
        return seconds

    def run_prompt(self, tokens: int) -> Pair:
        """Compute one prompt in as many steps as it needs, and return the sums of their times."""
        self.add(tokens, 1)
        steps = []
        while self.core.has_work:
            steps.append(self.step())
        seconds = sum(whole for whole, _ in steps)
        self.forecast.saw_prompt(tokens, seconds)
        return seconds, sum(inside for _, inside in steps)

    def drain(self) -> None:
        """Run steps until the engine has no requests."""
        while self.core.has_work:
            self._advance()

    def prefilling(self) -> bool:
        """Return whether a running request has prompt tokens that are not computed yet."""
        return any(r.num_output == 0 for r in self.core.scheduler.running)

    # --- records of results -------------------------------------------------------------------

    def rate(
        self,
        name: str,
        tokens: int,
        samples: Sequence[Pair],
        roofs: Sequence[float],
        of: str,
        shape: Mapping[str, float | str],
    ) -> None:
        """Emit a rate in tokens per second, with its share of the upper bounds `roofs`."""
        rates = [tokens / whole for whole, _ in samples]
        found = record(
            f"{name}_rate",
            "tokens/s",
            rates,
            self.where,
            better="more",
            roofs=roofs,
            of=of,
            parameters=shape,
        )
        self.emit(found)

    def show(self, name: str, samples: Sequence[Pair], shape: Mapping[str, float | str]) -> None:
        """Emit the times of whole steps, and the times that they spent outside the executor."""
        total = [1e3 * whole for whole, _ in samples]
        python = [1e6 * (whole - inside) for whole, inside in samples]
        self.cost(name, "ms", total, shape)
        self.cost(f"{name}_python", "us", python, shape)

    def cost(
        self, name: str, unit: str, samples: Sequence[float], shape: Mapping[str, float | str]
    ) -> None:
        """Emit a record of a metric that should be small, such as a time."""
        self.emit(record(name, unit, samples, self.where, better="less", parameters=shape))


class Forecast:
    """Predicts the seconds of prompts and of decode steps.

    The first prompt is short, so the first prediction for long prompts is usually too long.
    """

    def __init__(self) -> None:
        self._tokens = 0
        self._seconds = 0.0

    def saw_prompt(self, tokens: int, seconds: float) -> None:
        """Record that a prompt, or several at a time, took `seconds`. Long ones count more."""
        if tokens >= self._tokens:
            self._tokens, self._seconds = tokens, seconds

    def prompt(self, tokens: int) -> float:
        """Return the expected seconds of prompts with `tokens` tokens together."""
        return self._seconds * tokens / self._tokens if self._tokens else 0.0


def told_seconds(seconds: float) -> str:
    """Return an expected time as text, such as "about 40 s" or "about 3 minutes"."""
    if seconds < 1.5:
        return "about a second"
    return f"about {seconds:.0f} s" if seconds < 100 else f"about {seconds / 60:.0f} minutes"
