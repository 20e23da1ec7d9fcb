"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, in vLLM's formats.

They exist only with --allow-runtime-lora-updating, because clients name paths on the server's disk.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from cpuserve.api.lora.schema import LoadLoraRequest, UnloadLoraRequest
from cpuserve.api.request.context import read_call
from cpuserve.api.response.openapi import text_answer
from cpuserve.serving.adapters import load_adapter, unload_adapter

router = APIRouter()


def _answer(text: str) -> Response:
    return Response(text, media_type="text/plain")


@router.post("/v1/load_lora_adapter", openapi_extra=text_answer(LoadLoraRequest))
async def load_lora_adapter(request: Request) -> Response:
    """Load a LoRA adapter from the server's disk; requests then name it as their model."""
    async with read_call(request, "lora-", LoadLoraRequest) as (received, asked):
        await load_adapter(received.models, asked.lora_name, asked.lora_path, asked.load_inplace)
    return _answer(f"Success: LoRA adapter '{asked.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", openapi_extra=text_answer(UnloadLoraRequest))
async def unload_lora_adapter(request: Request) -> Response:
    """Unload a LoRA adapter; requests that use it run to their end."""
    async with read_call(request, "lora-", UnloadLoraRequest) as (received, asked):
        await unload_adapter(received.models, asked.lora_name)
    return _answer(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")
