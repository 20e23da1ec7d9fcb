"""GGUF files of LFM2, whose layers have attention or convolutions."""

from __future__ import annotations

from typing import Any

from cpuserve.loader.gguf.archs.experts import experts, need_sigmoid
from cpuserve.loader.gguf.archs.record import GgufArch
from cpuserve.loader.gguf.keys import Keys

_BLOCKS = {
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}


def _dense(keys: Keys) -> dict[str, Any]:
    return {
        "layer_types": keys.layer_types("conv", "full_attention"),
        "conv_L_cache": keys.count("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }


def _sparse(keys: Keys) -> dict[str, Any]:
    need_sigmoid(keys)
    return {
        **_dense(keys),
        **experts(keys),
        "num_dense_layers": keys.whole("leading_dense_block_count"),
        "use_expert_bias": any("exp_probs_b" in name for name in keys.file.tensors),
        "routed_scaling_factor": keys.real("expert_weights_scale", 1.0),
    }


DENSE = GgufArch("Lfm2ForCausalLM", "lfm2", _BLOCKS, _dense, eps="norm_eps")
SPARSE = GgufArch(
    "Lfm2MoeForCausalLM",
    "lfm2_moe",
    {
        **_BLOCKS,
        "ffn_gate_inp": "feed_forward.gate",
        "ffn_gate_exps": "feed_forward.experts.w1",
        "ffn_up_exps": "feed_forward.experts.w3",
        "ffn_down_exps": "feed_forward.experts.w2",
        "exp_probs_b": "feed_forward.expert_bias",
    },
    _sparse,
    eps="norm_eps",
)
