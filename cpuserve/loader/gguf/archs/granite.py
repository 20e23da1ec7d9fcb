"""GGUF files of Granite (dense, with experts, with windows, hybrids), and of MiniCPM."""

from __future__ import annotations

from typing import Any

from cpuserve.loader.gguf.archs.experts import PARTS
from cpuserve.loader.gguf.archs.llama_like import longrope
from cpuserve.loader.gguf.archs.record import GgufArch
from cpuserve.loader.gguf.keys import Keys

_GRANITE_MOE = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    **{f"ffn_{p}_exps": f"block_sparse_moe.experts.{p}_proj" for p in PARTS},
    "ffn_gate_shexp": "shared_mlp.gate_proj",
    "ffn_up_shexp": "shared_mlp.up_proj",
    "ffn_down_shexp": "shared_mlp.output_linear",
}


def _granite(keys: Keys) -> dict[str, Any]:
    return {
        "embedding_multiplier": keys.real("embedding_scale", 1.0),
        "residual_multiplier": keys.real("residual_scale", 1.0),
        "attention_multiplier": keys.real("attention.scale"),
        "logits_scaling": keys.real("logit_scale", 1.0),
    }


def _granite_swa(keys: Keys) -> dict[str, Any]:
    """Return entries of config.json for Granite SWA; the layers with a RoPE have the same base."""
    turns = keys.raw("attention.rope_pattern")
    if turns is not None and (not isinstance(turns, list) or any(t not in (0, 1) for t in turns)):
        keys.fail("attention.rope_pattern", turns, "a list of booleans")
    base = keys.real("rope.freq_base", 10000.0)
    width, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    settings = {
        "embedding_multiplier": keys.real("embedding_scale", 1.0),
        "residual_multiplier": keys.real("residual_scale", 1.0),
        "attention_multiplier": keys.real("attention.scale", (width // heads) ** -0.5),
        "logits_scaling": keys.real("logit_scale"),
        "sliding_window": keys.count("attention.sliding_window"),
        "layer_types": keys.windows(),
        "layer_rope_theta": turns and [base if t else 0 for t in turns[: keys.layers()]],
        "mlp_bias": keys.has("blk.0.ffn_up.bias"),
    }
    if not keys.whole("expert_count"):
        return settings
    return {
        **settings,
        "architectures": ["GraniteMoeSWAForCausalLM"],
        "model_type": "granitemoe_swa",
        "num_local_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "shared_intermediate_size": keys.whole("expert_shared_feed_forward_length"),
    }


def _minicpm(keys: Keys) -> dict[str, Any]:
    """Return entries of config.json; files without factors are of MiniCPM 1B and 2B, as llama.cpp
    reads them.
    """
    width, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    head_dim = keys.count("attention.key_length", max(1, width // heads))
    return {
        "embedding_multiplier": keys.real("embedding_scale", 12.0),
        "residual_multiplier": keys.real("residual_scale", 1.4 / keys.layers() ** 0.5),
        "attention_multiplier": head_dim**-0.5,
        "logits_scaling": keys.real("logit_scale", width / 256),
        **longrope(keys),
    }


def _granite_moe(keys: Keys) -> dict[str, Any]:
    return {
        **_granite(keys),
        "num_local_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "shared_intermediate_size": keys.whole("expert_shared_feed_forward_length"),
        "mlp_input_split": True,
    }


def _granite_hybrid(keys: Keys) -> dict[str, Any]:
    """Return entries of config.json for Granite 4.

    In a model without experts, feed_forward_length is the width of the shared MLP.
    """
    experts, width = keys.whole("expert_count"), keys.count("embedding_length")
    shared_key = "expert_shared_feed_forward_length" if experts else "feed_forward_length"
    channels = keys.count("ssm.inner_size")
    if channels % width:
        keys.fail("ssm.inner_size", channels, f"a multiple of embedding_length, {width}")
    return {
        **_granite(keys),
        "num_local_experts": experts,
        "num_experts_per_tok": keys.whole("expert_used_count"),
        "shared_intermediate_size": keys.count(shared_key),
        "mlp_input_split": True,
        "layer_types": keys.layer_types("mamba", "attention"),
        "position_embedding_type": "rope" if keys.flag("rope.scaling.finetuned", True) else None,
        "mamba_expand": channels // width,
        "mamba_n_heads": keys.count("ssm.time_step_rank"),
        "mamba_n_groups": keys.count("ssm.group_count", 1),
        "mamba_d_state": keys.count("ssm.state_size"),
        "mamba_d_conv": keys.count("ssm.conv_kernel"),
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in keys.file.tensors),
    }


ARCHS = {
    "granite": GgufArch("GraniteForCausalLM", "granite", settings=_granite, interleaved=True),
    "minicpm": GgufArch("GraniteForCausalLM", "granite", settings=_minicpm, interleaved=True),
    "granitemoe": GgufArch(
        "GraniteMoeForCausalLM",
        "granitemoe",
        _GRANITE_MOE,
        _granite_moe,
        interleaved=True,
    ),
    "granite_swa": GgufArch(
        "GraniteSWAForCausalLM",
        "granite_swa",
        {
            "attn_sinks": "self_attn.sinks",
            "ffn_gate_inp": "block_sparse_moe.router",
            **{f"ffn_{p}_exps": f"block_sparse_moe.experts.{p}_proj" for p in PARTS},
            "ffn_up_shexp": "shared_mlp.input_linear",  # gate and up
            "ffn_down_shexp": "shared_mlp.output_linear",
        },
        _granite_swa,
        interleaved=True,
    ),
    "granitehybrid": GgufArch(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        {
            **_GRANITE_MOE,
            "ffn_gate": "shared_mlp.gate_proj",
            "ffn_up": "shared_mlp.up_proj",
            "ffn_down": "shared_mlp.output_linear",
            "ssm_in": "mamba.in_proj",
            "ssm_conv1d": "mamba.conv1d",
            "ssm_dt": "mamba.dt_bias",
            "ssm_a": "mamba.A_log",
            "ssm_d": "mamba.D",
            "ssm_norm": "mamba.norm",
            "ssm_out": "mamba.out_proj",
        },
        _granite_hybrid,
        interleaved=True,
    ),
}
