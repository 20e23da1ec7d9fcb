"""GET /metrics in Prometheus' text format."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from cpuserve.api.endpoint import get_serving
from cpuserve.metrics import CONTENT_TYPE

router = APIRouter()


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return all metrics."""
    return Response(get_serving(request).metrics.text(), headers={"content-type": CONTENT_TYPE})
