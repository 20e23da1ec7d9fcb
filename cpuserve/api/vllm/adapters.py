"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, in the vLLM formats.

These routes exist only with --allow-runtime-lora-updating,
because they let clients choose paths on the server's disk.
"""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Response

from cpuserve.api.request.context import RequestContext
from cpuserve.api.route import post
from cpuserve.serving.models.lora import load_adapter, unload_adapter


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
