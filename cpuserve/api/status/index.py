"""GET /: what this server is, and where its API is."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response

from cpuserve.api.response.openapi import response_types
from cpuserve.api.response.unknown_route import BASE
from cpuserve.api.state import get_state
from cpuserve.version import version

router = APIRouter()


class Welcome(msgspec.Struct):
    """The body of GET /."""

    server: str
    version: str
    message: str
    models: list[str]
    routes: list[str]


@router.get("/", openapi_extra=response_types(Welcome))
async def welcome(request: Request) -> Response:
    """Describe this server and list its routes."""
    names = get_state(request).models.names
    message = (
        f"This is cpuserve, an inference server with OpenAI's API. The base URL for clients is the "
        f"address of this page followed by {BASE}."
    )
    welcome = Welcome("cpuserve", version(), message, list(names), request.app.state.paths)
    return Response(msgspec.json.encode(welcome), media_type="application/json")
