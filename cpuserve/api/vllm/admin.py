"""The administrative routes of vLLM, which only --admin-routes serves."""

from __future__ import annotations

import os
import platform
import sys
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from cpuserve.api.response.openapi import parameters, response_types
from cpuserve.api.state import get_state
from cpuserve.errors import InvalidRequest
from cpuserve.log import get_logger
from cpuserve.version import version

router = APIRouter()
log = get_logger("serve")


class ServerInfo(msgspec.Struct):
    """The body of GET /server_info.

    vllm_config: the settings of the first model's engines, as a text or as an object. The name of
    the field is the one that clients of vLLM read.
    """

    vllm_config: str | dict[str, Any]
    system_env: dict[str, Any]


class Sleeping(msgspec.Struct):
    """The body of GET /is_sleeping."""

    is_sleeping: bool


@router.get(
    "/server_info",
    openapi_extra={**response_types(ServerInfo), **parameters("", config_format=str)},
)
async def server_info(request: Request) -> Response:
    """Return the settings that the engines run with, and facts about the machine.

    The query may have config_format=json, which returns the settings as an object.
    """
    form = _asked(request, "config_format", ("text", "json"))
    config = get_state(request).config
    fields: dict[str, Any] = {} if config is None else msgspec.to_builtins(config, str_keys=True)
    shown: str | dict[str, Any] = fields
    if form == "text":
        shown = ", ".join(f"{name}={value!r}" for name, value in fields.items())
    system = {
        "cpuserve_version": version(),
        "python_version": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "byteorder": sys.byteorder,
    }
    return Response(msgspec.json.encode(ServerInfo(shown, system)), media_type="application/json")


@router.post(
    "/reset_prefix_cache",
    openapi_extra={
        **response_types(None),
        **parameters("", reset_running_requests=bool, reset_external=bool),
    },
)
async def reset_prefix_cache(request: Request) -> Response:
    """Forget the cached prefixes of all models; running requests keep the blocks that they use.

    So reset_running_requests=true of vLLM has no effect: no later request finds these blocks.
    Blocks in tiers of --kv-tiers or on disk stay, because they outlive the process.

    Raises:
      InvalidRequest: the request asks to empty these tiers as well.
      EngineDead: an engine ended before it had emptied its cache.
    """
    switches = ("false", "0", "true", "1")
    _asked(request, "reset_running_requests", switches)
    if _asked(request, "reset_external", switches) in switches[2:]:
        msg = (
            "reset_external is not supported: blocks in tiers belong to other servers as well. "
            "Stop the server and delete the files of a tier to empty it"
        )
        raise InvalidRequest(msg, param="reset_external")
    for context in list(get_state(request).models.loaded()):
        if context.client.alive:  # an engine that sleeps or restarts has no cached prefixes
            await context.client.ask("reset_prefix_cache")
    log.info("the prefix cache is empty")
    return Response(status_code=200)


@router.post("/sleep", openapi_extra={**response_types(None), **parameters("", level=int)})
async def sleep(request: Request) -> Response:
    """Unload all models that no request uses; the next request loads its model again.

    The levels 1 and 2 of vLLM are the same here: the weights stay in the files of the model.

    Raises:
      InvalidRequest: requests are running, or the query has another level.
    """
    _asked(request, "level", ("1", "2"))
    if not await get_state(request).models.sleep():
        msg = "Requests use a model now, so it was not unloaded: try again when they have ended"
        raise InvalidRequest(msg)
    return Response(status_code=200)


@router.post("/wake_up", openapi_extra=response_types(None))
async def wake_up(request: Request) -> Response:
    """Load the first model, if it sleeps, and return when it serves.

    Raises:
      ServiceUnavailable: the model cannot be loaded now.
    """
    async with get_state(request).models.first_loaded():
        pass
    return Response(status_code=200)


@router.get("/is_sleeping", openapi_extra=response_types(Sleeping))
async def is_sleeping(request: Request) -> Response:
    """Return whether no model is loaded."""
    sleeping = Sleeping(get_state(request).models.asleep)
    return Response(msgspec.json.encode(sleeping), media_type="application/json")


def _asked(request: Request, name: str, known: tuple[str, ...]) -> str:
    """Return a value of the query, the first of `known` if it is not given."""
    value = request.query_params.get(name, known[0]).lower()
    if value not in known:
        msg = f"{name} is {value[:40]!r}, but it must be one of {', '.join(known)}"
        raise InvalidRequest(msg, param=name)
    return value
