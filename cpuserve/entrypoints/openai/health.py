"""GET /health, /ping and /version."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response

from cpuserve.entrypoints.openai.endpoint import get_serving
from cpuserve.version import version

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> Response:
    """200 when requests are answered, else 503 with the reason: loading, stopping or dead.

    The body is empty, unless only some of several engines serve.
    """
    serving = get_serving(request)
    serving.check_available()
    replicas = serving.client.replicas
    up = sum(replica.serves for replica in replicas)
    if up == len(replicas):
        return Response(status_code=200)
    body = {"status": "degraded", "replicas": len(replicas), "serving": up}
    return Response(msgspec.json.encode(body), media_type="application/json")


@router.get("/ping")
@router.post("/ping", operation_id="ping_post")
async def ping(request: Request) -> Response:
    """The same as /health, under SageMaker's name."""
    return await health(request)


@router.get("/version")
async def show_version() -> Response:
    """The version of cpuserve."""
    return Response(msgspec.json.encode({"version": version()}), media_type="application/json")
