"""Administrative routes of vLLM, which the server has only with --admin-routes."""

from __future__ import annotations

import os
import platform
import sys
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from cpuserve.api.request.state import get_state
from cpuserve.api.route import get, post_nothing
from cpuserve.errors import InvalidRequest
from cpuserve.log import get_logger
from cpuserve.version import version

router = APIRouter()
log = get_logger("serve")


class ServerInfo(msgspec.Struct):
    """The response to GET /server_info.

    vllm_config: the settings of the first model's engines, as a text or as an object;
    clients of vLLM read this field name.
    """

    vllm_config: str | dict[str, Any]
    system_env: dict[str, Any]


class Sleeping(msgspec.Struct):
    """The response to GET /is_sleeping: whether all models are unloaded."""

    is_sleeping: bool


@get(router, "/server_info", ServerInfo, config_format=str)
async def server_info(request: Request) -> Response:
    """Return the settings of the engines, and facts about the machine.

    With config_format=json in the query, the settings are an object instead of a text.
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


@post_nothing(router, "/reset_prefix_cache", None, reset_running_requests=bool, reset_external=bool)
async def reset_prefix_cache(request: Request) -> Response:
    """Clear the prefix caches of all models; running requests keep the blocks that they use.

    Later requests cannot find the blocks of running requests, so the vLLM parameter
    reset_running_requests=true has no effect. Tiers of --kv-tiers keep their blocks.

    Raises:
      InvalidRequest: the request sets reset_external, to clear the tiers of --kv-tiers as well.
      EngineDead: an engine ended before it had cleared its cache.
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
        if context.client.alive:  # a sleeping or restarting engine has no cached prefixes
            await context.client.ask("reset_prefix_cache")
    log.info("the prefix cache is empty")
    return Response(status_code=200)


@post_nothing(router, "/sleep", None, level=int)
async def sleep(request: Request) -> Response:
    """Unload all models, if no request uses them; the next request loads its model again.

    Levels 1 and 2 of vLLM mean the same here, because the weights stay in the model's files.

    Raises:
      InvalidRequest: requests are running, or `level` is neither 1 nor 2.
    """
    _asked(request, "level", ("1", "2"))
    if not await get_state(request).models.sleep():
        msg = "Requests use a model now, so it was not unloaded: try again when they have ended"
        raise InvalidRequest(msg)
    return Response(status_code=200)


@post_nothing(router, "/wake_up", None)
async def wake_up(request: Request) -> Response:
    """Load the first model if it is not loaded, and return when it can serve requests.

    Raises:
      ServiceUnavailable: the model cannot be loaded now.
    """
    async with get_state(request).models.first_loaded():
        pass
    return Response(status_code=200)


@get(router, "/is_sleeping", Sleeping)
async def is_sleeping(request: Request) -> Response:
    """Return whether all models are unloaded."""
    sleeping = Sleeping(get_state(request).models.asleep)
    return Response(msgspec.json.encode(sleeping), media_type="application/json")


def _asked(request: Request, name: str, known: tuple[str, ...]) -> str:
    """Return a query parameter with one of the values in `known`; the first one is the default."""
    value = request.query_params.get(name, known[0]).lower()
    if value not in known:
        msg = f"{name} is {value[:40]!r}, but it must be one of {', '.join(known)}"
        raise InvalidRequest(msg, param=name)
    return value
