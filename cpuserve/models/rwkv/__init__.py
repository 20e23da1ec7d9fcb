"""RWKV 6 and 7, and Qwen2.5 with their recurrent layers."""

from __future__ import annotations

from cpuserve.models.family import ModelFamily, TokenizerTables

FAMILIES = (
    ModelFamily(
        ("RWKV6ForCausalLM",),
        "cpuserve.models.rwkv.rwkv6:Rwkv6",
        tokenizer=TokenizerTables(
            files={"rwkv_vocab*.txt": "cpuserve.models.rwkv.tokenizer:read_tokenizer"},
            gguf={"rwkv": "cpuserve.models.rwkv.tokenizer:IN_GGUF"},
        ),
        gguf={"rwkv6": "cpuserve.models.rwkv.gguf:RWKV_6"},
    ),
    ModelFamily(("Rwkv6ForCausalLM",), "cpuserve.models.rwkv.rwkv6:Finch"),
    ModelFamily(
        ("RWKV6Qwen2ForCausalLM",),
        "cpuserve.models.rwkv.rwkv6:Rwkv6Qwen2",
        gguf={"rwkv6qwen2": "cpuserve.models.rwkv.gguf:QRWKV_6"},
    ),
    ModelFamily(
        ("RWKV7ForCausalLM", "Rwkv7ForCausalLM"),
        "cpuserve.models.rwkv.rwkv7:Rwkv7",
        gguf={"rwkv7": "cpuserve.models.rwkv.gguf:RWKV_7"},
    ),
    ModelFamily(
        ("RwkvHybridForCausalLM",),
        "cpuserve.models.rwkv.rwkv7:Arwkv7",
        gguf={"arwkv7": "cpuserve.models.rwkv.gguf:ARWKV_7"},
    ),
)
