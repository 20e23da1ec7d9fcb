"""GET /metrics in the text format of Prometheus."""

from __future__ import annotations

from itertools import chain

from fastapi import APIRouter, Request, Response

from cpuserve.api.request.state import get_state
from cpuserve.api.response.openapi import TEXT, response_types
from cpuserve.api.status.adapter_metrics import AdapterMetrics
from cpuserve.metrics.families import CONTENT_TYPE, exposition, server_families

router = APIRouter()


@router.get("/metrics", openapi_extra=response_types(None, media=TEXT))
async def metrics(request: Request) -> Response:
    """Return all metrics of the server in the text format of Prometheus."""
    state = get_state(request)
    contexts = list(state.models.contexts())
    adapters = AdapterMetrics(
        [name for context in contexts for name in context.adapters],
        [each for context in contexts for each in context.metrics.sequences()],
    )
    models = [server_families(context.metrics) for context in contexts]
    text = exposition(chain(*models, adapters.collect(), state.http.collect()))
    return Response(text, headers={"content-type": CONTENT_TYPE})
