"""The bodies of /v1/load_lora_adapter and /v1/unload_lora_adapter; the fields are as in vLLM."""

from __future__ import annotations

import msgspec


class LoadLoraRequest(msgspec.Struct):
    """lora_path: a path on the server's disk. load_inplace: replace an adapter with this name."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadLoraRequest(msgspec.Struct):
    """The name of the LoRA adapter to unload."""

    lora_name: str
