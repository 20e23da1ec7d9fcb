"""GET /metrics in Prometheus' text format."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from cpuserve.api.response.openapi import TEXT, response_types
from cpuserve.api.state import get_state
from cpuserve.api.status.adapter_metrics import AdapterMetrics
from cpuserve.metrics import CONTENT_TYPE

router = APIRouter()


@router.get("/metrics", openapi_extra=response_types(None, media=TEXT))
async def metrics(request: Request) -> Response:
    """Return all metrics."""
    state = get_state(request)
    contexts = list(state.models.contexts())
    first, *others = [context.metrics for context in contexts]
    adapters = AdapterMetrics(
        [name for context in contexts for name in context.adapters],
        [each for context in contexts for each in context.metrics.sequences()],
    )
    text = first.text([*others, adapters, state.http])
    return Response(text, headers={"content-type": CONTENT_TYPE})
