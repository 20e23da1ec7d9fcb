"""The body of GET /v1/activity; `cpuserve top` reads it without importing the HTTP server."""

from __future__ import annotations

import msgspec

from cpuserve.platforms.cpu_times import CpuTimes


class SequenceActivity(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence, without its text and its client.

    *_s: seconds on the clock of Activity.time, null if it has not happened.
    state: waiting, prompt or generating, and at the end the reason: stop, length, repetition, abort
      or error.
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
    """The gauges and counters of one model's engines, and its last sequences, the oldest first.

    kv_usage: the share of kv_bytes in use.
    busy_s: seconds in steps.
    weight_bytes: packed weights that steps read.
    roofline_bytes_per_s: the memory bandwidth, null until it is measured.
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
    """The body of GET /v1/activity. time: seconds on the clock of all its times."""

    object: str
    time: float
    models: list[ModelActivity]
    cpus: list[CpuTimes]
