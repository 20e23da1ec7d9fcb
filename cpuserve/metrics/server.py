"""Observations of a model's sequences: times, counts and histograms.

Observations are plain additions made on the event loop's thread, without locks.
families.py converts them to metrics when /metrics is read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from cpuserve.base.waits import main_cause
from cpuserve.metrics.figures import CpuSample, ReplicaFigures, StepStats
from cpuserve.metrics.histogram import (
    ITERATION_TOKENS,
    PARAMS_N,
    REQUEST_S,
    TOKEN_S,
    TTFT_S,
    BucketHistogram,
    buckets_1_2_5,
)

# The most callers with metrics of their own. All other callers together are the caller "other".
MAX_CALLERS = 100
# How many ended sequences `sequences` remembers.
MAX_ENDED = 200
FINISHED_REASONS = ("stop", "length", "repetition", "abort", "error")
# Labels that name the HTTP request which the current task serves, for exemplars of histograms.
SERVED: ContextVar[Mapping[str, str] | None] = ContextVar("served", default=None)


@dataclass(slots=True, eq=False)
class Sequence:
    """The times and counts of one sequence; created by ServerMetrics.start.

    arrival, first, last, scheduled, ended: time.monotonic(), 0.0 = not yet.
    queued, held: the seconds of each cause for which it waited before its first step, and after
      that without a token of its prompt in a step (base/waits.py).
    reason: why the sequence ended.
    of: labels that name its HTTP request; None outside of a request.
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
    queued: Mapping[str, float] = field(default_factory=dict)
    held: Mapping[str, float] = field(default_factory=dict)
    ended: float = 0.0
    reason: str = ""
    tokens: int = 0
    cached_tokens: int = 0
    of: Mapping[str, str] | None = field(default_factory=SERVED.get)


class ServerMetrics:
    """The observations of one model with one engine or several.

    max_model_len: the largest bound of the histograms of lengths, in tokens.
    stats: returns the engine's latest StepStats; with `several` engines, their sums.
    cache: the labels of cache_config_info.
    cpu: returns the values of the CPU metrics; None = without them.
    replicas: returns the figures of each engine, for the metrics of restarts.
    several: metrics of an engine have its number as the label `engine`, all others have "all".
    tiers: the offload tiers of the KV cache that have metrics.
    drafts: whether there are metrics of speculative decoding.
    media: whether there are metrics of encoded media.
    experts: whether there are metrics of a pool of experts.
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
        media: bool = False,
        experts: bool = False,
    ) -> None:
        self.tiers = tuple(tiers)
        self.drafts = drafts
        self.media = media
        self.experts = experts
        self.cpu = cpu
        self.replicas = replicas
        self.several = several
        self.labels = {"model_name": model_name, "engine": "all" if several else "0"}
        self.stats = stats
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
        self.computed_ahead = 0  # prompt tokens that were computed before a request had them
        lengths = buckets_1_2_5(max_model_len)
        self.ttft = BucketHistogram(TTFT_S)
        self.itl = BucketHistogram(TOKEN_S)
        self.per_token = BucketHistogram(TOKEN_S)
        self.e2e = BucketHistogram(REQUEST_S)
        # By the cause of the longest part of each wait; a request is counted once.
        self.queue = {"step": BucketHistogram(REQUEST_S)}
        self.prefill = BucketHistogram(REQUEST_S)
        self.decode = BucketHistogram(REQUEST_S)
        self.inference = BucketHistogram(REQUEST_S)
        self.request_prompt = BucketHistogram(lengths)
        self.request_generation = BucketHistogram(lengths)
        self.request_max_tokens = BucketHistogram(lengths)
        self.params_max_tokens = BucketHistogram(lengths)
        self.params_n = BucketHistogram(PARAMS_N)
        self.iteration = BucketHistogram(ITERATION_TOKENS)

    def start(
        self, prompt_tokens: int, max_tokens: int, n: int, caller: str = "", adapter: str = ""
    ) -> Sequence:
        """Return the record of a sequence that is now sent to the engine."""
        self.active += 1
        self._started += 1
        sequence = Sequence(self._started, prompt_tokens, max_tokens, n, caller, adapter)
        self._active[sequence.number] = sequence
        return sequence

    def sequences(self) -> list[Sequence]:
        """Return the last MAX_ENDED sequences that have ended, then those that have not."""
        return [*self._ended, *self._active.values()]

    def on_tokens(
        self,
        sequence: Sequence,
        tokens: int,
        cached_tokens: int,
        scheduled: float,
        waits: tuple[Mapping[str, float], Mapping[str, float]] = ({}, {}),
    ) -> None:
        """Record an output of the engine with `tokens` new tokens.

        scheduled: the time (time.monotonic) when the sequence first ran, 0.0 if it is unknown.
        waits: Sequence.queued and Sequence.held.
        """
        now = time.monotonic()
        if sequence.first == 0.0:
            sequence.first = now
            sequence.scheduled = scheduled or sequence.arrival
            sequence.queued, sequence.held = waits
            self.ttft.observe(now - sequence.arrival, sequence.of, now)
            self.prompt_tokens += sequence.prompt_tokens
            self.cached_tokens += cached_tokens
            sequence.cached_tokens = cached_tokens
        elif tokens:
            self.itl.observe(now - sequence.last, sequence.of, now)
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
        self._count_caller(sequence)
        observed: list[tuple[BucketHistogram, float]] = [
            (self.e2e, now - sequence.arrival),
            (self.request_prompt, sequence.prompt_tokens),
            (self.request_generation, sequence.tokens),
            (self.request_max_tokens, sequence.tokens),
            (self.params_max_tokens, sequence.max_tokens),
            (self.params_n, sequence.n),
        ]
        if sequence.first:
            last = sequence.last or sequence.first
            observed += [
                (self._queue_of(sequence), max(0.0, sequence.scheduled - sequence.arrival)),
                (self.prefill, sequence.first - sequence.scheduled),
                (self.decode, last - sequence.first),
                (self.inference, last - sequence.scheduled),
            ]
            if sequence.tokens > 1:
                per_token = (last - sequence.first) / (sequence.tokens - 1)
                observed.append((self.per_token, per_token))
        for histogram, value in observed:
            histogram.observe(value, sequence.of, now)

    def _queue_of(self, sequence: Sequence) -> BucketHistogram:
        return self.queue.setdefault(main_cause(sequence.queued), BucketHistogram(REQUEST_S))

    def _count_caller(self, sequence: Sequence) -> None:
        known = sequence.caller in self.callers or len(self.callers) < MAX_CALLERS
        totals = self.callers.setdefault(sequence.caller if known else "other", [0, 0, 0])
        prompt = sequence.prompt_tokens if sequence.first else 0
        for i, number in enumerate((1, prompt, sequence.tokens)):
            totals[i] += number

    def gauges(self) -> tuple[int, int, float]:
        """Return the running sequences, the waiting sequences and the KV cache usage (0 to 1).

        The engine's figures are from its last step, and no step follows the abort of the last
        sequence. So the figures are limited to the sequences that the front end counts: an idle
        server shows zeros. All other sequences of the front end count as waiting: autoscalers must
        see the requests of the last seconds, and a step with long prompts takes seconds.
        """
        stats = self.stats()
        running = min(stats.running, self.active)
        return running, self.active - running, stats.kv_usage if self.active else 0.0
