"""RWKV 6 and 7, and Qwen2.5 with their recurrent layers."""

from __future__ import annotations

from cpuserve.models.family import ModelFamily

FAMILIES = (
    ModelFamily(("RWKV6ForCausalLM",), "cpuserve.models.rwkv.rwkv6:Rwkv6"),
    ModelFamily(("Rwkv6ForCausalLM",), "cpuserve.models.rwkv.rwkv6:Finch"),
    ModelFamily(("RWKV6Qwen2ForCausalLM",), "cpuserve.models.rwkv.rwkv6:Rwkv6Qwen2"),
    ModelFamily(("RWKV7ForCausalLM", "Rwkv7ForCausalLM"), "cpuserve.models.rwkv.rwkv7:Rwkv7"),
    ModelFamily(("RwkvHybridForCausalLM",), "cpuserve.models.rwkv.rwkv7:Arwkv7"),
)
