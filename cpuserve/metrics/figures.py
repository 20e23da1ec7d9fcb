"""The figures that the engines and the machine report for the metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


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
    media_queries: int
    media_hits: int
    encode_s: float
    expert_hits: int
    expert_misses: int
    expert_bytes: int
    expert_wait_s: float
    expert_errors: int
    expert_guesses: int
    expert_right_guesses: int


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

    busy_s, weight_bytes: seconds spent in steps, and bytes of weights read by them,
      since the start.
    barrier_wait_s: seconds that threads waited for others in steps, summed over the threads.
    roofline_bytes_per_s: the measured memory bandwidth, 0 before it is measured.
    throttled_*, quota: None without a CPU quota.
    numa_binding: how memory is placed on NUMA nodes ("bind", "first_touch", "interleave", "none").
    """

    threads: int
    busy_s: float
    weight_bytes: float
    barrier_wait_s: float
    roofline_bytes_per_s: float
    throttled_periods: int | None
    throttled_s: float | None
    quota: float | None
    numa_binding: str = "none"
