"""GET /models, and GET /models/sse, which reports models that are loaded or unloaded."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter, Request, Response

from cpuserve.api.errors.error_json import error_json
from cpuserve.api.openai.models import ModelList, list_models
from cpuserve.api.request.state import ServerState, get_state
from cpuserve.api.response.openapi import EVENTS, response_types
from cpuserve.api.response.stream import EventStream, StreamFormat
from cpuserve.api.route import get

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

router = APIRouter()
# How many seconds pass between two checks for models that were loaded or unloaded.
_POLL_S = 1.0
_LISTED_ANEW: dict[str, object] = {"model": "*", "event": "models_reload"}


router.add_api_route(
    "/models",
    list_models,
    methods=["GET"],
    name="list_llamacpp_models",
    openapi_extra=response_types(ModelList),
)


@get(router, "/models/sse", None, media=EVENTS)
async def watch_models(request: Request) -> Response:
    """Stream an event for each model that is loaded or unloaded, until the server stops."""
    state = get_state(request)
    return EventStream(_events(state), state.limits.silent_s, StreamFormat(), _failed)


def _failed(error: BaseException) -> bytes:
    return b"data: " + error_json(error) + b"\n\n"


async def _events(state: ServerState) -> AsyncGenerator[bytes, None]:
    yield b": connected\n\n"
    reported = _statuses(state)
    while not state.draining:  # the server waits for open streams before it stops
        await asyncio.sleep(_POLL_S)
        now = _statuses(state)
        changes = [_changed(name, now[name]) for name in now if reported.get(name) != now[name]]
        if now.keys() != reported.keys():
            changes = [_LISTED_ANEW]
        reported = now
        for change in changes:
            yield b"data: " + msgspec.json.encode(change) + b"\n\n"


def _statuses(state: ServerState) -> Mapping[str, str]:
    return {name: state.models.status(name) for name in state.models.names}


def _changed(name: str, status: str) -> dict[str, object]:
    return {"model": name, "event": "status_change", "data": {"status": status}}
