"""GET /v1/cpu: the machine, the thread placement, and utilization over the last ten seconds."""

from __future__ import annotations

import asyncio

import msgspec
from fastapi import APIRouter, Request, Response

from cpuserve.api.request.state import get_state
from cpuserve.api.route import get
from cpuserve.api.status.cpu_view import CpuReport, CpuView
from cpuserve.errors import DeadlineExceeded, NotFound

router = APIRouter()

REPORT_S = 10.0  # seconds within which the engine must finish its step and respond


@get(router, "/v1/cpu", CpuReport, also=[504])
async def show_cpu(request: Request) -> Response:
    """Report the machine, the thread placement and the utilization of the last ten seconds.

    Raises:
        DeadlineExceeded: the engine does not report within REPORT_S.
    """
    state = get_state(request)
    state.check_available()
    view: CpuView | None = state.cpu
    if view is None:
        msg = "This server has no CPU report: use GET /metrics"
        raise NotFound(msg)
    try:
        engine = await asyncio.wait_for(state.context.client.ask("report"), REPORT_S)
    except asyncio.TimeoutError:
        msg = (
            f"The engine has not reported within {REPORT_S:g} s because it is in a long step or "
            f"hangs: try again, and check /health"
        )
        raise DeadlineExceeded(msg) from None
    rates = view.meter.rates()
    report = await asyncio.to_thread(view.report, engine, *rates)
    return Response(msgspec.json.encode(report), media_type="application/json")
