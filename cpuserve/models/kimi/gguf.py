"""GGUF files of Kimi Linear; those of Kimi K2 are files of DeepSeek V3 (deepseek2)."""

from __future__ import annotations

from typing import Any

from cpuserve.loader.gguf.archs.deepseek import (
    LATENT,
    ROW_DELTA,
    latent_settings,
    row_delta_settings,
)
from cpuserve.loader.gguf.archs.experts import need_sigmoid
from cpuserve.loader.gguf.archs.record import GgufArch
from cpuserve.loader.gguf.keys import Keys

_BLOCKS = {
    **{name: hf.replace("mlp.", "block_sparse_moe.") for name, hf in LATENT.items()},
    "ffn_gate_exps": "block_sparse_moe.experts.w1",
    "ffn_up_exps": "block_sparse_moe.experts.w3",
    "ffn_down_exps": "block_sparse_moe.experts.w2",
    **ROW_DELTA,
}


def _linear(keys: Keys) -> dict[str, Any]:
    """Return entries of config.json for latent attention, and for delta nets (without KV heads)."""
    need_sigmoid(keys)
    return {
        **latent_settings(keys),
        **row_delta_settings(keys),
        "norm_topk_prob": True,  # as in llama.cpp: its converter does not write this key
    }


LINEAR = GgufArch("KimiLinearForCausalLM", "kimi_linear", _BLOCKS, _linear, each_rate=True)
