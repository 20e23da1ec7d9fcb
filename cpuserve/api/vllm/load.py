"""GET /load: the number of running and waiting sequences of the server."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response

from cpuserve.api.request.state import get_state
from cpuserve.api.route import get

router = APIRouter()


class ServerLoad(msgspec.Struct):
    """The response to GET /load: the number of sequences."""

    server_load: int


@get(router, "/load", ServerLoad)
async def server_load(request: Request) -> Response:
    """Return the number of running and waiting sequences in all models, `n` per request."""
    models = get_state(request).models
    load = ServerLoad(sum(context.active_sequences for context in models.loaded()))
    return Response(msgspec.json.encode(load), media_type="application/json")
