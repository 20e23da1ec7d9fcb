"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, in the vLLM formats.

These routes exist only with --allow-runtime-lora-updating,
because they let clients choose paths on the server's disk.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter, Response

from cpuserve.api.request.context import RequestContext
from cpuserve.api.route import post
from cpuserve.errors import InvalidRequest, NotFound, RequestError
from cpuserve.log import get_logger

if TYPE_CHECKING:
    from cpuserve.serving.models.registry import ModelRegistry


class LoadLoraRequest(msgspec.Struct):
    """lora_path: a path on the server's disk. load_inplace: replace an adapter with this name."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadLoraRequest(msgspec.Struct):
    """The name of the LoRA adapter to unload."""

    lora_name: str


router = APIRouter()


@post(
    router,
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
    router,
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
log = get_logger("serve")


async def load_adapter(models: ModelRegistry, name: str, path: str, in_place: bool) -> None:
    """Load the adapter at `path` in all engines; requests can then name it as their model.

    path: a directory of PEFT or a GGUF file.
    in_place: replace a loaded adapter with this name.
      Running requests keep the adapter that they started with.

    Raises:
        NotFound: there is nothing at `path` (404).
        InvalidRequest: the adapter cannot be served, or not under this name; nothing has changed.
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
        if not path or not await asyncio.to_thread(_exists, path):
            msg = (
                f"No adapter found for {name!r}: {path[:200]!r} is no file or directory of the "
                "server. Adapters are loaded from its disk only: give the path of one there"
            )
            raise NotFound(msg, param="lora_path")
        async with models.first_loaded():
            details = {"name": name, "path": path, "in_place": in_place}
            reply = await context.client.ask("load_adapter", **details)
        if "error" in reply:
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
