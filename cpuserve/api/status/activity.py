"""GET /v1/activity: current figures of the engines, and their recent sequences."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter, Request, Response

from cpuserve.api.request.state import get_state
from cpuserve.api.route import get
from cpuserve.api.status.activity_body import Activity, ModelActivity, SequenceActivity
from cpuserve.platforms.cpu_times import cpu_times

if TYPE_CHECKING:
    from cpuserve.metrics.server import Sequence
    from cpuserve.serving.models.context import ModelContext

router = APIRouter()


@get(router, "/v1/activity", Activity)
async def show_activity(request: Request) -> Response:
    """Report the running and recent sequences of all loaded models, and the times of all CPUs."""
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
