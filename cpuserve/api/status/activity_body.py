"""The body of GET /v1/activity; `cpuserve top` reads it without importing the HTTP server."""

from __future__ import annotations

import msgspec

from cpuserve.platforms.cpu_times import CpuTimes


class SequenceActivity(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence, without its text and without its client.

    *_s: times in seconds on the clock of Activity.time; null = not happened yet.
    state: "waiting", "prompt" or "generating";
      after the end the reason: "stop", "length", "repetition", "abort" or "error".
    """

    number: int
    state: str
    arrived_s: float
    scheduled_s: float | None
    first_s: float | None
    ended_s: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class ModelActivity(msgspec.Struct, frozen=True, kw_only=True):
    """The gauges and counters of one model's engines, and its recent sequences, oldest first.

    kv_usage: the used share of the KV cache, which has kv_bytes bytes.
    busy_s: seconds that engines spent in steps.
    weight_bytes: bytes of packed weights that steps have read.
    roofline_bytes_per_s: the measured memory bandwidth; null until it is measured.
    """

    model: str
    running: int
    waiting: int
    kv_usage: float
    kv_bytes: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    busy_s: float
    weight_bytes: float
    roofline_bytes_per_s: float | None
    sequences: list[SequenceActivity]


class Activity(msgspec.Struct, frozen=True, kw_only=True):
    """The body of GET /v1/activity. time: the time now, in seconds of a monotonic clock."""

    object: str
    time: float
    models: list[ModelActivity]
    cpus: list[CpuTimes]
