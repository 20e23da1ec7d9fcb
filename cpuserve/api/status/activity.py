"""GET /v1/activity: live figures of the engines, and the last sequences."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter, Request, Response

from cpuserve.api.response.openapi import response_types
from cpuserve.api.state import get_state
from cpuserve.platforms.cpu_times import CpuTimes, cpu_times

if TYPE_CHECKING:
    from cpuserve.metrics.server import Sequence
    from cpuserve.serving.context import ModelContext

router = APIRouter()


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
    roofline_bytes_per_s: the measured memory bandwidth, null before that.
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


@router.get("/v1/activity", openapi_extra=response_types(Activity))
async def show_activity(request: Request) -> Response:
    """Report running and recent sequences of the loaded models, and the times of the CPUs."""
    contexts = get_state(request).models.contexts()
    activity = Activity(
        object="activity",
        time=time.monotonic(),
        models=[_model(context) for context in contexts],
        cpus=cpu_times(),
    )
    return Response(
        msgspec.json.encode(activity),
        media_type="application/json",
        headers={"cache-control": "no-store"},
    )


def _model(context: ModelContext) -> ModelActivity:
    metrics, stats = context.metrics, context.client.stats
    running, waiting, usage = metrics.gauges()
    return ModelActivity(
        model=context.model_names[0],
        running=running,
        waiting=waiting,
        kv_usage=usage,
        kv_bytes=context.kv_bytes,
        prompt_tokens=metrics.prompt_tokens,
        cached_tokens=metrics.cached_tokens,
        output_tokens=metrics.generation_tokens,
        busy_s=stats.busy_s,
        weight_bytes=stats.weight_bytes,
        roofline_bytes_per_s=stats.roofline_bytes_per_s or None,
        sequences=[_sequence(sequence) for sequence in metrics.sequences()],
    )


def _sequence(sequence: Sequence) -> SequenceActivity:
    state = sequence.reason or (
        "generating" if sequence.first else "prompt" if sequence.scheduled else "waiting"
    )
    return SequenceActivity(
        number=sequence.number,
        state=state,
        arrived_s=sequence.arrival,
        scheduled_s=sequence.scheduled or None,
        first_s=sequence.first or None,
        ended_s=sequence.ended or None,
        prompt_tokens=sequence.prompt_tokens,
        cached_tokens=sequence.cached_tokens,
        output_tokens=sequence.tokens,
    )
