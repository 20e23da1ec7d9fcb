"""POST /v1/systemone."""

from __future__ import annotations

from fastapi import APIRouter, Response

from cpuserve.api.request.context import RequestContext
from cpuserve.api.route import generate, post
from cpuserve.api.systemone.schema import (
    SystemOneAnswer,
    SystemOneRequest,
    systemone_call,
)
from cpuserve.api.systemone.writer import DecisionWriter

router = APIRouter()


@post(
    router,
    "/v1/systemone",
    schema=SystemOneRequest,
    response=SystemOneAnswer,
    id_prefix="decision-",
    words=lambda _: {"prompt": "state", "messages": "state", "n": "questions"},
)
async def decide(received: RequestContext, asked: SystemOneRequest) -> Response:
    """Return the probability of each option of each question about a state."""
    return await generate(received, asked, systemone_call, DecisionWriter)
