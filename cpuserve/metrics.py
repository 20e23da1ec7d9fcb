"""Prometheus metrics with the names of vLLM, so that its dashboards and autoscalers work unchanged.

Observations are plain additions made on the event loop's thread: no locks and no objects per
token. prometheus-client only formats them, when /metrics is read.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# The bounds follow vLLM (v1/metrics/loggers.py, v0.30), because alerting rules use them.
_TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKEN_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
_REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_PARAMS_N = (1, 2, 5, 10, 20)

# metric name -> field of StepStats
ENGINE_COUNTERS = {
    "num_preemptions": "preemptions",
    "prefix_cache_queries": "prefix_queries",
    "prefix_cache_hits": "prefix_hits",
}
# metric name -> (field of StepStats, help text), for speculative decoding
DRAFT_COUNTERS = {
    "num_drafts": ("drafts", "Times that a sequence got draft tokens."),
    "num_draft_tokens": ("draft_tokens", "Draft tokens verified."),
    "num_accepted_tokens": ("accepted_tokens", "Draft tokens that were right."),
}
# (metric name, help text) for the metrics of each caller, which is an API key or an address.
CALLER_COUNTERS = (
    ("requests", "Finished sequences of each caller."),
    ("prompt_tokens", "Prompt tokens of the finished sequences of each caller."),
    ("generation_tokens", "Tokens generated for each caller."),
)
# The most callers with metrics of their own. All other callers together are the caller "other".
MAX_CALLERS = 100
# How many ended sequences `sequences` remembers.
MAX_ENDED = 200
FINISHED_REASONS = ("stop", "length", "repetition", "abort", "error")


class Collected(Protocol):
    """An object with metrics of its own."""

    def collect(self) -> Iterable[Metric]:
        """Yield all metric families with their samples."""


class HttpMetrics:
    """Counts the responses of the HTTP server, refusals included, in the metric of vLLM.

    As in vLLM, the label `status` is the class of the response, such as "4xx". The label `code`
    separates 429 from 400.
    """

    def __init__(self) -> None:
        self._answers: dict[tuple[str, str, int], int] = {}

    def count(self, handler: str, method: str, code: int) -> None:
        """Record a response; the number of different handlers and methods must have a bound."""
        key = (handler, method, code)
        self._answers[key] = self._answers.get(key, 0) + 1

    def collect(self) -> Iterable[Metric]:
        """Yield all metric families with their samples."""
        answers = CounterMetricFamily(
            "http_requests",
            "HTTP requests answered, by route, method and status.",
            labels=["handler", "method", "status", "code"],
        )
        for (handler, method, code), number in self._answers.items():
            answers.add_metric([handler, method, f"{code // 100}xx", str(code)], number)
        yield answers


class TierFigures(Protocol):
    """The contents of an offload tier, and how many blocks were restored from it."""

    @property
    def blocks(self) -> int:
        """The number of KV blocks in the tier."""

    @property
    def bytes(self) -> int:
        """The size of these blocks in bytes."""

    @property
    def hits(self) -> int:
        """The number of blocks that were restored from the tier."""


class StepStats(Protocol):
    """The engine's gauges, and its counters since the start (engine/ipc.py Stats)."""

    running: int
    waiting: int
    kv_usage: float
    preemptions: int
    prompt_tokens: int
    generation_tokens: int
    prefix_queries: int
    prefix_hits: int

    @property
    def tiers(self) -> Mapping[str, TierFigures]:
        """The offload tiers of the KV cache by name."""

    drafts: int
    draft_tokens: int
    accepted_tokens: int


class ReplicaFigures(Protocol):
    """State and figures of one engine (engine/client.py ReplicaStatus)."""

    @property
    def serves(self) -> bool: ...

    @property
    def restarts(self) -> int: ...

    @property
    def stats(self) -> StepStats: ...


@dataclass(frozen=True, slots=True)
class CpuSample:
    """Values of the CPU metrics.

    busy_s, weight_bytes: seconds spent in steps, and bytes of weights read by them, since the
    start. roofline_bytes_per_s: the measured memory bandwidth, 0 before it is measured.
    throttled_*, quota: None without a CPU quota. numa_binding: how memory is placed on NUMA nodes
    ("bind", "first_touch", "interleave", "none").
    """

    threads: int
    busy_s: float
    weight_bytes: float
    roofline_bytes_per_s: float
    throttled_periods: int | None
    throttled_s: float | None
    quota: float | None
    numa_binding: str = "none"


class Histogram:
    """A histogram: counts per bucket and a sum; for use on one thread."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(float(b) for b in bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count `value` in the first bucket with a bound not below it."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Return (upper bound, number of values up to it) of all buckets, ending with +Inf."""
        total = 0
        out: list[tuple[str, float]] = []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            out.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        return out


def buckets_1_2_5(most: int) -> list[int]:
    """Return 1, 2, 5, 10, 20, 50, ... up to `most`."""
    out: list[int] = []
    scale = 1
    while scale <= most:
        out += [step * scale for step in (1, 2, 5) if step * scale <= most]
        scale *= 10
    return out


@dataclass(slots=True)
class Sequence:
    """The times and counts of one sequence; created by ServerMetrics.start.

    arrival, first, last, scheduled, ended: time.monotonic(), 0.0 = not yet. reason: why it ended.
    """

    number: int
    prompt_tokens: int
    max_tokens: int
    n: int
    caller: str = ""
    adapter: str = ""
    arrival: float = field(default_factory=time.monotonic)
    first: float = 0.0
    last: float = 0.0
    scheduled: float = 0.0
    ended: float = 0.0
    reason: str = ""
    tokens: int = 0
    cached_tokens: int = 0


class ServerMetrics:
    """All metrics of one endpoint with one engine or several.

    `stats` returns the engine's latest StepStats. `cache`: the labels of cache_config_info.
    `cpu` adds the CPU metrics, and `tiers` the metrics of these offload tiers of the KV cache;
    their names begin with "cpuserve:". `drafts` adds the metrics of speculative decoding.
    `replicas` returns the figures of each engine, and adds whether it serves and how often it was
    restarted. With `several` engines, `stats` returns their sums. Metrics of an engine then have
    its number as the label `engine`, and metrics measured at the endpoint have "all".
    """

    def __init__(
        self,
        *,
        model_name: str,
        max_model_len: int,
        stats: Callable[[], StepStats],
        cache: Mapping[str, object] | None = None,
        cpu: Callable[[], CpuSample] | None = None,
        replicas: Callable[[], Iterable[ReplicaFigures]] = tuple,
        several: bool = False,
        tiers: Iterable[str] = (),
        drafts: bool = False,
    ) -> None:
        self._tiers = tuple(tiers)
        self._drafts = drafts
        self._cpu = cpu
        self._replicas = replicas
        self._several = several
        self._labels = {"model_name": model_name, "engine": "all" if several else "0"}
        self._stats = stats
        self.cache: dict[str, object] = dict(cache or {})
        self._step_tokens = 0
        self.active = 0
        self._started = 0
        self._active: dict[int, Sequence] = {}
        self._ended: deque[Sequence] = deque(maxlen=MAX_ENDED)
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.cached_tokens = 0
        self.finished = dict.fromkeys(FINISHED_REASONS, 0)
        # {caller: [ended sequences, their prompt tokens, their generated tokens]}.
        self.callers: dict[str, list[int]] = {}
        self.cache_misses: dict[str, int] = {}
        lengths = buckets_1_2_5(max_model_len)
        self.ttft = Histogram(_TTFT_S)
        self.itl = Histogram(_TOKEN_S)
        self.per_token = Histogram(_TOKEN_S)
        self.e2e = Histogram(_REQUEST_S)
        self.queue = Histogram(_REQUEST_S)
        self.prefill = Histogram(_REQUEST_S)
        self.decode = Histogram(_REQUEST_S)
        self.inference = Histogram(_REQUEST_S)
        self.request_prompt = Histogram(lengths)
        self.request_generation = Histogram(lengths)
        self.request_max_tokens = Histogram(lengths)
        self.params_max_tokens = Histogram(lengths)
        self.params_n = Histogram(_PARAMS_N)
        self.iteration = Histogram(_ITERATION_TOKENS)

    def start(self, prompt_tokens: int, max_tokens: int, n: int, caller: str = "") -> Sequence:
        """Return the record of a sequence that is now sent to the engine."""
        self.active += 1
        self._started += 1
        sequence = Sequence(self._started, prompt_tokens, max_tokens, n, caller)
        self._active[sequence.number] = sequence
        return sequence

    def sequences(self) -> list[Sequence]:
        """Return the last MAX_ENDED sequences that have ended, then those that have not."""
        return [*self._ended, *self._active.values()]

    def on_tokens(
        self, sequence: Sequence, tokens: int, cached_tokens: int, scheduled: float
    ) -> None:
        """Record an output of the engine with `tokens` new tokens.

        `scheduled` is the time (time.monotonic) when the sequence first ran, 0.0 if it is unknown.
        """
        now = time.monotonic()
        if sequence.first == 0.0:
            sequence.first = now
            sequence.scheduled = scheduled or sequence.arrival
            self.ttft.observe(now - sequence.arrival)
            self.prompt_tokens += sequence.prompt_tokens
            self.cached_tokens += cached_tokens
            sequence.cached_tokens = cached_tokens
        elif tokens:
            self.itl.observe(now - sequence.last)
        if tokens:
            sequence.last = now
            sequence.tokens += tokens
            self.generation_tokens += tokens

    def on_cache_miss(self, reason: str) -> None:
        """Record that tokens of an earlier prompt are computed again; see RecentPrompt.miss."""
        self.cache_misses[reason] = self.cache_misses.get(reason, 0) + 1

    def on_step(self, stats: StepStats) -> None:
        """Record a step's size: tokens of completed prompts and generated tokens, as in vLLM."""
        total = stats.prompt_tokens + stats.generation_tokens
        self.iteration.observe(total - self._step_tokens)
        self._step_tokens = total

    def finish(self, sequence: Sequence, reason: str) -> None:
        """Record the end of a sequence; a reason outside FINISHED_REASONS counts as "error"."""
        self.active -= 1
        reason = reason if reason in self.finished else "error"
        self.finished[reason] += 1
        now = time.monotonic()
        sequence.ended, sequence.reason = now, reason
        self._active.pop(sequence.number, None)
        self._ended.append(sequence)
        self.e2e.observe(now - sequence.arrival)
        self.request_prompt.observe(sequence.prompt_tokens)
        self.request_generation.observe(sequence.tokens)
        self.request_max_tokens.observe(sequence.tokens)
        self.params_max_tokens.observe(sequence.max_tokens)
        self.params_n.observe(sequence.n)
        self._count_caller(sequence)
        if sequence.first == 0.0:
            return
        last = sequence.last or sequence.first
        self.queue.observe(max(0.0, sequence.scheduled - sequence.arrival))
        self.prefill.observe(sequence.first - sequence.scheduled)
        self.decode.observe(last - sequence.first)
        self.inference.observe(last - sequence.scheduled)
        if sequence.tokens > 1:
            self.per_token.observe((last - sequence.first) / (sequence.tokens - 1))

    def _count_caller(self, sequence: Sequence) -> None:
        known = sequence.caller in self.callers or len(self.callers) < MAX_CALLERS
        totals = self.callers.setdefault(sequence.caller if known else "other", [0, 0, 0])
        prompt = sequence.prompt_tokens if sequence.first else 0
        for i, number in enumerate((1, prompt, sequence.tokens)):
            totals[i] += number

    def text(self, others: Iterable[Collected] = ()) -> bytes:
        """Return all metrics and `others` in the text format of Prometheus (CONTENT_TYPE)."""
        registry = CollectorRegistry()
        registry.register(_Exposition([self, *others]))
        return generate_latest(registry)

    def gauges(self) -> tuple[int, int, float]:
        """Return the running sequences, the waiting sequences and the KV cache usage (0 to 1).

        The engine's figures are from its last step, and no step follows the abort of the last
        sequence. So they are limited to the sequences that the front end counts, and an idle server
        shows zeros. All other sequences of the front end count as waiting: a step with long prompts
        takes seconds, and autoscalers must see the requests that came since the step began.
        """
        stats = self._stats()
        running = min(stats.running, self.active)
        return running, self.active - running, stats.kv_usage if self.active else 0.0

    def collect(self) -> Iterable[Metric]:
        """Yield all metric families with their samples."""
        yield from self._collect_gauges()
        yield from self._collect_counters()
        yield from self._collect_histograms()
        if self.callers:
            yield from self._collect_callers()
        if self._tiers:
            yield from self._collect_tiers()
        if self._drafts:
            yield from self._collect_drafts()
        if self._cpu is not None:
            yield from self._collect_cpu(self._cpu())

    def _engines(self) -> list[tuple[list[str], StepStats]]:
        """Return (label values, figures) of each engine."""
        model = self._labels["model_name"]
        if not self._several:
            return [(list(self._labels.values()), self._stats())]
        return [([model, str(i)], r.stats) for i, r in enumerate(self._replicas())]

    def _collect_gauges(self) -> Iterable[Metric]:
        running = self._gauge("num_requests_running", "Requests in the running batch.")
        waiting = self._gauge("num_requests_waiting", "Requests waiting to be scheduled.")
        kv_usage = self._gauge("kv_cache_usage_perc", "KV cache in use, 1 is full.")
        for engine, stats in self._engines():
            # With several engines, the figures of each are already limited to its own sequences.
            figures = (stats.running, stats.waiting, stats.kv_usage)
            figures = figures if self._several else self.gauges()
            for gauge, value in zip((running, waiting, kv_usage), figures, strict=True):
                gauge.add_metric(engine, value)
        yield from (running, waiting, kv_usage)
        yield from self._collect_replicas()
        labels = {**self._labels, **{name: str(value) for name, value in self.cache.items()}}
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "Configuration of the KV cache.", labels=list(labels)
        )
        info.add_metric(list(labels.values()), 1)
        yield info

    def _collect_replicas(self) -> Iterable[Metric]:
        """Yield which engines serve, and how often each was restarted."""
        replicas = list(self._replicas())
        if not replicas:
            return
        names = list(self._labels)
        serves = GaugeMetricFamily(
            "cpuserve:replica_up", "1 while the engine serves.", labels=names
        )
        restarts = CounterMetricFamily(
            "cpuserve:replica_restarts", "Restarts after the engine died.", labels=names
        )
        for i, replica in enumerate(replicas):
            labels = [self._labels["model_name"], str(i)]
            serves.add_metric(labels, replica.serves)
            restarts.add_metric(labels, replica.restarts)
        yield from (serves, restarts)

    def _collect_counters(self) -> Iterable[Metric]:
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens of sequences with a first token.", self.prompt_tokens),
            ("generation_tokens", "Tokens generated.", self.generation_tokens),
            (
                "prompt_tokens_cached",
                "Prompt tokens found in the prefix cache.",
                self.cached_tokens,
            ),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
            counter.add_metric(list(self._labels.values()), value)
            yield counter
        for name, text in (
            ("num_preemptions", "Sequences preempted."),
            ("prefix_cache_queries", "Tokens looked up in the prefix cache."),
            ("prefix_cache_hits", "Tokens found in the prefix cache."),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
            for labels, stats in self._engines():
                counter.add_metric(labels, getattr(stats, ENGINE_COUNTERS[name]))
            yield counter
        misses = CounterMetricFamily(
            "cpuserve:prompt_cache_misses",
            "Prompts that share less than expected with an earlier one of their caller.",
            labels=[*self._labels, "reason"],
        )
        for reason, count in self.cache_misses.items():
            misses.add_metric([*self._labels.values(), reason], count)
        if self.cache_misses:
            yield misses
        success = CounterMetricFamily(
            "vllm:request_success",
            "Finished requests by reason.",
            labels=[*self._labels, "finished_reason"],
        )
        for reason, count in self.finished.items():
            success.add_metric([*self._labels.values(), reason], count)
        yield success

    def _collect_callers(self) -> Iterable[Metric]:
        """Yield the figures of each caller that has sent requests."""
        for i, (name, text) in enumerate(CALLER_COUNTERS):
            counter = CounterMetricFamily(
                f"cpuserve:caller_{name}", text, labels=[*self._labels, "caller"]
            )
            for caller, totals in self.callers.items():
                counter.add_metric([*self._labels.values(), caller], totals[i])
            yield counter

    def _collect_tiers(self) -> Iterable[Metric]:
        """Yield the size and the hits of the KV cache's offload tiers."""
        names = [*self._labels, "tier"]
        blocks = GaugeMetricFamily("cpuserve:kv_tier_blocks", "KV blocks in a tier.", labels=names)
        size = GaugeMetricFamily("cpuserve:kv_tier_bytes", "Bytes in a tier.", labels=names)
        hits = CounterMetricFamily(
            "cpuserve:kv_tier_hits", "KV blocks restored instead of recomputed.", labels=names
        )
        for labels, stats in self._engines():
            for name in self._tiers:
                tier = stats.tiers.get(name)
                for family, what in ((blocks, "blocks"), (size, "bytes"), (hits, "hits")):
                    family.add_metric([*labels, name], getattr(tier, what, 0))
        yield from (blocks, size, hits)

    def _collect_drafts(self) -> Iterable[Metric]:
        for name, (field_name, text) in DRAFT_COUNTERS.items():
            counter = CounterMetricFamily(
                f"vllm:spec_decode_{name}", text, labels=list(self._labels)
            )
            for labels, stats in self._engines():
                counter.add_metric(labels, getattr(stats, field_name))
            yield counter

    def _collect_cpu(self, cpu: CpuSample) -> Iterable[Metric]:
        """Yield CPU metrics; rate(bytes) / rate(busy) / roofline is the share of the roofline."""
        labels = list(self._labels)
        for name, text, value in (
            ("cpu_threads", "Compute threads.", cpu.threads),
            ("cpu_quota", "CPU quota of the control group, in CPUs.", cpu.quota),
            (
                "cpu_roofline_bytes_per_second",
                "Memory bandwidth, measured at the start.",
                cpu.roofline_bytes_per_s or None,
            ),
        ):
            if value is not None:
                gauge = GaugeMetricFamily(f"cpuserve:{name}", text, labels=labels)
                gauge.add_metric(list(self._labels.values()), value)
                yield gauge
        binding = GaugeMetricFamily(
            "cpuserve:numa_binding",
            "How memory is placed on NUMA nodes: bind, first_touch, interleave, none (one rank).",
            labels=["mode", *labels],
        )
        binding.add_metric([cpu.numa_binding, *self._labels.values()], 1)
        yield binding
        for name, text, value in (
            ("cpu_busy_seconds", "Time spent in engine steps.", cpu.busy_s),
            ("cpu_weight_bytes_read", "Bytes of weights read by steps.", cpu.weight_bytes),
            ("cpu_nr_throttled", "Periods throttled by the CPU quota.", cpu.throttled_periods),
            ("cpu_throttled_seconds", "Time throttled by the CPU quota.", cpu.throttled_s),
        ):
            if value is not None:
                counter = CounterMetricFamily(f"cpuserve:{name}", text, labels=labels)
                counter.add_metric(list(self._labels.values()), value)
                yield counter

    def _collect_histograms(self) -> Iterable[Metric]:
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From arrival to first token.", self.ttft),
            ("inter_token_latency_seconds", "Time between two outputs.", self.itl),
            # The name in vLLM until 0.11, which older dashboards still use.
            ("time_per_output_token_seconds", "Time between two outputs.", self.itl),
            ("request_time_per_output_token_seconds", "Mean of a request.", self.per_token),
            ("e2e_request_latency_seconds", "From arrival to last token.", self.e2e),
            ("request_queue_time_seconds", "From arrival to first step.", self.queue),
            ("request_prefill_time_seconds", "From first step to first token.", self.prefill),
            ("request_decode_time_seconds", "From first token to last token.", self.decode),
            ("request_inference_time_seconds", "From first step to last token.", self.inference),
            ("request_prompt_tokens", "Prompt tokens per request.", self.request_prompt),
            ("request_generation_tokens", "Generated tokens per request.", self.request_generation),
            (
                "request_max_num_generation_tokens",
                "Largest number of generated tokens of a request's sequences.",
                self.request_max_tokens,
            ),
            ("request_params_max_tokens", "max_tokens of requests.", self.params_max_tokens),
            ("request_params_n", "n of requests.", self.params_n),
            ("iteration_tokens_total", "Tokens per engine step.", self.iteration),
        ):
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), histogram.cumulative(), histogram.sum)
            yield family

    def _gauge(self, name: str, text: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"vllm:{name}", text, labels=list(self._labels))


class _Exposition(Collector):
    """Passes the metrics to prometheus-client when /metrics is read."""

    def __init__(self, sources: Iterable[Collected]) -> None:
        self._sources = sources

    def collect(self) -> Iterable[Metric]:
        """Return each family once, with the samples of all models; labels distinguish them."""
        families: dict[str, Metric] = {}
        for source in self._sources:
            for family in source.collect():
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples.extend(family.samples)
        return families.values()

    def describe(self) -> Iterable[Metric]:
        # All metrics are distinct, so there is nothing to check at registration.
        return ()
