"""GGUF files of Qwen3-Next, Qwen3.5 and Qwen3.5 with experts."""

from __future__ import annotations

from typing import Any

from cpuserve.loader.gguf.archs.experts import EXPERTS
from cpuserve.loader.gguf.archs.qwen import DELTA, GATED_SHARED, delta, shared_experts
from cpuserve.loader.gguf.archs.record import GgufArch
from cpuserve.loader.gguf.keys import Keys


def _dense_settings(keys: Keys) -> dict[str, Any]:
    return {**delta(keys), "linear_value_heads_tiled": True}


def _mixture_settings(keys: Keys) -> dict[str, Any]:
    return {**_dense_settings(keys), **shared_experts(keys)}


def _next_settings(keys: Keys) -> dict[str, Any]:
    is_split = any(name.endswith(".attn_qkv.weight") for name in keys.file.tensors)
    return {**delta(keys), **shared_experts(keys), "linear_in_proj_split": is_split}


DENSE = GgufArch(
    "Qwen3_5ForCausalLM", "qwen3_5_text", DELTA, _dense_settings, added_norms=True, tiled=True
)
SPARSE = GgufArch(
    "Qwen3_5MoeForCausalLM",
    "qwen3_5_moe_text",
    {**DELTA, **EXPERTS, **GATED_SHARED},
    _mixture_settings,
    added_norms=True,
    tiled=True,
)
NEXT = GgufArch(
    "Qwen3NextForCausalLM",
    "qwen3_next",
    {**DELTA, **EXPERTS, **GATED_SHARED},
    _next_settings,
    added_norms=True,
)
