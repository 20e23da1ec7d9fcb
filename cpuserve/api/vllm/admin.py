"""Administrative routes of vLLM, which the server has only with options.

router: with --admin-routes. lora_router: POST /v1/load_lora_adapter and /v1/unload_lora_adapter,
with --allow-runtime-lora-updating, because they let clients choose paths on the server's disk.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter, Request, Response

from cpuserve.api.request.context import RequestContext
from cpuserve.api.request.state import get_state
from cpuserve.api.route import get, post, post_nothing
from cpuserve.base.errors import InvalidRequest, NotFound, RequestError, ServiceUnavailable
from cpuserve.base.log import get_logger
from cpuserve.base.version import version
from cpuserve.serving.threads import run_waiting

if TYPE_CHECKING:
    from cpuserve.serving.models.registry import ModelRegistry


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


class LoadLoraRequest(msgspec.Struct):
    """lora_path: a path on the server's disk. load_inplace: replace an adapter with this name."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadLoraRequest(msgspec.Struct):
    """The name of the LoRA adapter to unload."""

    lora_name: str


lora_router = APIRouter()


@post(
    lora_router,
    "/v1/load_lora_adapter",
    schema=LoadLoraRequest,
    response=None,
    id_prefix="lora-",
    pages=False,
)
async def load_lora_adapter(request: RequestContext, body: LoadLoraRequest) -> Response:
    """Load a LoRA adapter from the server's disk; requests select it by its name as `model`."""
    await load_adapter(request.models, body.lora_name, body.lora_path, body.load_inplace)
    return _text(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@post(
    lora_router,
    "/v1/unload_lora_adapter",
    schema=UnloadLoraRequest,
    response=None,
    id_prefix="lora-",
    pages=False,
)
async def unload_lora_adapter(request: RequestContext, body: UnloadLoraRequest) -> Response:
    """Unload a LoRA adapter; running requests that use it still finish."""
    await unload_adapter(request.models, body.lora_name)
    return _text(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _text(text: str) -> Response:
    return Response(text, media_type="text/plain")


MAX_NAME_CHARS = 256


async def load_adapter(models: ModelRegistry, name: str, path: str, in_place: bool) -> None:
    """Load the adapter at `path` in all engines; requests can then name it as their model.

    path: a directory of PEFT or a GGUF file.
    in_place: replace a loaded adapter with this name.
      Running requests keep the adapter that they started with.

    Raises:
        NotFound: there is nothing at `path` (404).
        InvalidRequest: the adapter cannot be served, or not under this name; nothing has changed.
        ServiceUnavailable: this system refuses to open or to read its files now (503).
        EngineDead: no engine can load it now (503).
    """
    context = models.first
    _check_name(name)
    async with context.adapter_lock:
        if name in models.names and name not in context.adapters:
            msg = f"{name!r} is the name of a model: give the adapter another lora_name"
            raise InvalidRequest(msg, param="lora_name")
        if name in context.adapters and not in_place:
            msg = (
                f"The lora adapter {name!r} has already been loaded. If you want to load the "
                "adapter in place, set 'load_inplace' to True"
            )
            raise InvalidRequest(msg, param="lora_name")
        if not path or not await run_waiting(lambda: _exists(path)):
            msg = (
                f"No adapter found for {name!r}: {path[:200]!r} is no file or directory of the "
                "server. Adapters are loaded from its disk only: give the path of one there"
            )
            raise NotFound(msg, param="lora_path")
        async with models.first_loaded():
            details = {"name": name, "path": path, "in_place": in_place}
            reply = await context.client.ask("load_adapter", **details)
        if "error" in reply:
            if reply.get("again"):
                raise ServiceUnavailable(str(reply["error"]))
            if not reply.get("fault"):
                raise RequestError(str(reply["error"]))
            raise InvalidRequest(str(reply["error"]), param="lora_path")
        context.adapters[name] = path
        log.info("adapter %s is loaded from %s", name, path)


async def unload_adapter(models: ModelRegistry, name: str) -> None:
    """Unload an adapter in all engines; requests that use it run to their end.

    Raises:
        NotFound: there is no such adapter (404).
    """
    context = models.first
    _check_name(name)
    async with context.adapter_lock:
        if name not in context.adapters:
            loaded = ", ".join(context.adapters) or "none"
            msg = f"The lora adapter {name!r} cannot be found. Those that are loaded: {loaded}"
            raise NotFound(msg, param="lora_name")
        del context.adapters[name]  # from now on requests do not find the adapter
        if context.default_adapter == name:
            context.default_adapter, context.default_scale = None, 1.0
        async with models.first_loaded():
            await context.client.ask("unload_adapter", name=name)
        log.info("adapter %s is unloaded", name)


def _check_name(name: str) -> None:
    if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable() or name != name.strip():
        wanted = f"a name of 1 to {MAX_NAME_CHARS} printable characters"
        msg = f"lora_name is {name[:80]!r}, but it must be {wanted}"
        raise InvalidRequest(msg, param="lora_name")


def _exists(path: str) -> bool:
    try:
        return Path(path).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # the path is invalid, for example too long
        return False
