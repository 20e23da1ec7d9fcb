"""The bodies of /v1/load_lora_adapter and /v1/unload_lora_adapter; the fields are as in vLLM."""

from __future__ import annotations

import msgspec


class LoadLoraRequest(msgspec.Struct):
    """lora_path: on the server's disk. load_inplace: replace the adapter of this name, if any."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadLoraRequest(msgspec.Struct):
    """The adapter to unload."""

    lora_name: str
