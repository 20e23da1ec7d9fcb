"""GET /health, /ping, /live and /version."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response

from cpuserve.api.errors.http_errors import error_response
from cpuserve.api.request.state import get_state
from cpuserve.api.response.writer import json_response
from cpuserve.api.route import get, post_nothing
from cpuserve.background import troubles
from cpuserve.errors import ServiceUnavailable
from cpuserve.serving.models.load_progress import health_body
from cpuserve.version import version

router = APIRouter()


class Version(msgspec.Struct):
    """The response to GET /version."""

    version: str


@get(router, "/health", None)
@get(router, "/v1/health", None, operation_id="health_v1")
async def health(request: Request) -> Response:
    """Report whether clients should send requests here: 200, or 503 with the reason.

    The body of a 200 is empty, unless only some of several engines can serve
    or a background task has failed; then `status` is "degraded", and `reasons` says why.
    The body of a 503 has the usual error and `status`:
    "loading" (with `stage`, and `done` and `total` in bytes), "draining" (the server will stop,
    but still serves new requests), "restarting" (the engine has died), or "failed": the engine
    has ended for good, the model's weights are damaged, or its files have changed.
    """
    state = get_state(request)
    unhealthy = state.unhealthy()
    if unhealthy is not None:
        status, reason = unhealthy
        response = error_response(ServiceUnavailable(reason))
        loading = state.context.loading if status == "loading" else None
        shown = health_body(bytes(response.body), status, loading)
        headers = {"retry-after": response.headers["retry-after"]}
        return Response(shown, 503, headers, media_type="application/json")
    replicas = state.context.client.replicas
    up = sum(replica.serves for replica in replicas)
    reasons = troubles()
    if up == len(replicas) and not reasons:
        return Response(status_code=200)
    body: dict[str, object] = {"status": "degraded"}
    if up < len(replicas):
        body |= {"replicas": len(replicas), "serving": up}
    if reasons:
        body["reasons"] = reasons
    return Response(msgspec.json.encode(body), media_type="application/json")


@get(router, "/ping", None)
@post_nothing(router, "/ping", None, operation_id="ping_post")
async def ping(request: Request) -> Response:
    """The same as /health, at the path that SageMaker uses."""
    return await health(request)


@get(router, "/live", None)
async def live() -> Response:
    """Respond with 200 as long as this process handles HTTP requests.

    It responds while the model is downloaded and loaded, and while the server drains. A supervisor
    should restart the server if there is no response; load balancers should use /health.
    """
    return Response(status_code=200)


@get(router, "/version", Version)
async def show_version() -> Response:
    """Return the version of cpuserve."""
    return json_response(Version(version()))
