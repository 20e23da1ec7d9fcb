"""Families: RWKV."""

from __future__ import annotations

from cpuserve.models.family import ModelFamily

FAMILIES = (
    ModelFamily(("RWKV6ForCausalLM",), "cpuserve.models.rwkv6:Rwkv6"),
    ModelFamily(("Rwkv6ForCausalLM",), "cpuserve.models.rwkv6:Finch"),
    ModelFamily(("RWKV6Qwen2ForCausalLM",), "cpuserve.models.rwkv6:Rwkv6Qwen2"),
    ModelFamily(("RWKV7ForCausalLM", "Rwkv7ForCausalLM"), "cpuserve.models.rwkv:Rwkv7"),
    ModelFamily(("RwkvHybridForCausalLM",), "cpuserve.models.rwkv:Arwkv7"),
)
