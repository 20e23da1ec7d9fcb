"""GGUF files of Qwen: dense models, mixtures of experts, and models with gated delta nets."""

from __future__ import annotations

from typing import Any

from cpuserve.loader.gguf.archs.experts import EXPERTS, experts, shared
from cpuserve.loader.gguf.archs.record import GgufArch
from cpuserve.loader.gguf.keys import Keys

DELTA = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    # The name in files from before December 2025.
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}


GATED_SHARED = {
    **shared("shared_expert"),
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}


def shared_experts(keys: Keys) -> dict[str, Any]:
    """Return entries of config.json for experts, and for one that all tokens share."""
    width = keys.count("expert_shared_feed_forward_length")
    return {**experts(keys), "shared_expert_intermediate_size": width}


def _qwen2_moe(keys: Keys) -> dict[str, Any]:
    return {
        **shared_experts(keys),
        "norm_topk_prob": False,
        "qkv_bias": keys.has("blk.0.attn_q.bias"),
    }


def delta(keys: Keys) -> dict[str, Any]:
    """Return entries of config.json for gated delta nets, and the kind of each layer."""
    values = keys.count("ssm.time_step_rank")
    width = keys.count("ssm.inner_size")
    if width % values:
        keys.fail("ssm.inner_size", width, f"a multiple of ssm.time_step_rank, {values}")
    settings: dict[str, Any] = {
        "linear_num_key_heads": keys.count("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_key_head_dim": keys.count("ssm.state_size"),
        "linear_value_head_dim": width // values,
        "linear_conv_kernel_dim": keys.count("ssm.conv_kernel"),
        "full_attention_interval": keys.count("full_attention_interval", 4),
    }
    kinds = keys.raw("attention.recurrent_layers")
    if kinds is None:
        return settings
    if not isinstance(kinds, list) or not all(isinstance(kind, bool) for kind in kinds):
        keys.fail("attention.recurrent_layers", kinds, "a list of booleans")
    names = ("full_attention", "linear_attention")
    return {**settings, "layer_types": [names[k] for k in kinds[: keys.layers()]]}


def _qwen3_moe(keys: Keys) -> dict[str, Any]:
    return {**experts(keys), "norm_topk_prob": True}


ARCHS = {
    "qwen2": GgufArch("Qwen2ForCausalLM", "qwen2"),
    # The text models of Qwen2-VL, Qwen2.5-VL and Qwen3-VL.
    # Their RoPE has positions on three axes, which are equal for text.
    "qwen2vl": GgufArch("Qwen2ForCausalLM", "qwen2"),
    "qwen3vl": GgufArch("Qwen3ForCausalLM", "qwen3"),
    "qwen3vlmoe": GgufArch("Qwen3MoeForCausalLM", "qwen3_moe", EXPERTS, _qwen3_moe),
    "qwen2moe": GgufArch(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        {**EXPERTS, **GATED_SHARED},
        _qwen2_moe,
    ),
    "qwen3": GgufArch("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": GgufArch("Qwen3MoeForCausalLM", "qwen3_moe", EXPERTS, _qwen3_moe),
}
