"""GGUF files of RWKV 6 and 7, and of QRWKV 6 and ARWKV 7: Qwen2.5 with their recurrent layers."""

from __future__ import annotations

from typing import Any

from cpuserve.loader.gguf.archs.record import GgufArch
from cpuserve.loader.gguf.keys import Keys

# Of the norms of heads, whatever the width of heads and the epsilon of other norms.
HEAD_EPS = 64e-5
_RANKS = {
    "decay_low_rank_dim": "attention.decay_lora_rank",
    "a_low_rank_dim": "attention.iclr_lora_rank",
    "v_low_rank_dim": "attention.value_residual_mix_lora_rank",
}
_TIME = {
    "time_mix_lerp_fused": "attn.x_x",
    **{f"time_mix_{part}0": f"attn.{part}_lora.lora.2.bias" for part in "wav"},
    **{f"time_mix_{part}1": f"attn.{part}_lora.lora.0" for part in "wavg"},
    **{f"time_mix_{part}2": f"attn.{part}_lora.lora.2" for part in "wavg"},
    **{f"time_mix_{part}": f"attn.{part}" for part in ("k_k", "k_a", "r_k")},
    "time_mix_receptance": "attn.r_proj",
    "time_mix_key": "attn.k_proj",
    "time_mix_value": "attn.v_proj",
    "time_mix_output": "attn.o_proj",
    "time_mix_ln": "attn.g_norm",
}


def _sizes(keys: Keys) -> dict[str, Any]:
    """Return the sizes of recurrent layers, under the keys of flash-linear-attention."""
    return {
        "head_dim": keys.count("wkv.head_size"),
        **{name: keys.count(key) for name, key in _RANKS.items()},
        "gate_low_rank_dim": keys.whole("attention.gate_lora_rank"),
        "head_norm_eps": HEAD_EPS,
        "stacked_shift": True,
    }


def _rwkv7(keys: Keys) -> dict[str, Any]:
    shifts = keys.count("token_shift_count", 2)
    if shifts != 2:
        keys.fail("token_shift_count", shifts, "2")
    return {
        **_sizes(keys),
        "intermediate_size": keys.count("feed_forward_length"),
        "hidden_act": "sqrelu",
    }


def _arwkv7(keys: Keys) -> dict[str, Any]:
    shifts = keys.count("token_shift_count", 2)
    if shifts != 1:
        keys.fail("token_shift_count", shifts, "1")
    normed = "blk.0.time_mix_ln.weight" in keys.file.tensors
    return {
        **_sizes(keys),
        "intermediate_size": keys.count("feed_forward_length"),
        "head_norm": normed,
    }


_TIME_6 = {
    "time_mix_lerp_x": "attn.x_proj.0.mu",
    "time_mix_w1": "attn.x_proj.0.linear",
    "time_mix_w2": "attn.x_proj.2",
    "time_mix_lerp_fused": "attn.x_proj.2.bias",
    **{f"time_mix_lerp_{part}": f"attn.x_{part}.bias" for part in "rwkvg"},  # early files
    "time_mix_first": "attn.bonus",
    "time_mix_decay": "attn.w_proj.linear.lora.2.bias",
    "time_mix_decay_w1": "attn.w_proj.linear.lora.0",
    "time_mix_decay_w2": "attn.w_proj.linear.lora.2",
    "time_mix_receptance": "attn.r_proj.linear",
    "time_mix_key": "attn.k_proj.linear",
    "time_mix_value": "attn.v_proj.linear",
    "time_mix_gate": "attn.g_proj.linear",
    "time_mix_output": "attn.o_proj",
    "time_mix_ln": "attn.g_norm",
}


def _sizes_6(keys: Keys, shifts: int) -> dict[str, Any]:
    """Return the sizes of recurrent layers, under the keys of flash-linear-attention.

    shifts: how many mixtures with rows before a layer must have.
    """
    num_shifts = keys.count("token_shift_count", 2)
    if num_shifts != shifts:
        keys.fail("token_shift_count", num_shifts, str(shifts))
    width, head_dim = keys.count("embedding_length"), keys.count("wkv.head_size")
    if width % head_dim:
        keys.fail("wkv.head_size", head_dim, f"a divisor of embedding_length ({width})")
    return {
        "head_dim": head_dim,
        "num_heads": width // head_dim,
        "expand_k": 1.0,
        "proj_low_rank_dim": keys.count("time_mix_extra_dim"),
        "gate_low_rank_dim": keys.count("time_decay_extra_dim"),
        "head_norm_eps": HEAD_EPS,
        "mixture_order": "wkvrg",
        "separate_shift": not keys.has("blk.0.time_mix_lerp_fused.weight"),
        "intermediate_size": keys.count("feed_forward_length"),
    }


def _rwkv6(keys: Keys) -> dict[str, Any]:
    interval = keys.whole("rescale_every_n_layers")
    return {**_sizes_6(keys, 2), "hidden_act": "sqrelu", "rescale_every": interval}


def _rwkv6qwen2(keys: Keys) -> dict[str, Any]:
    sizes = _sizes_6(keys, 1)
    return {
        **sizes,
        "num_kv_heads": keys.whole("attention.head_count_kv") or sizes["num_heads"],
        "key_bias": keys.has("blk.0.time_mix_key.bias"),
        "head_norm": False,
    }


_CHANNELS = {
    "attn_norm": "attn_norm",
    "attn_norm_2": "ffn_norm",
    "channel_mix_value": "ffn.value",
}
_TOP = {
    "token_embd": "model.embeddings",
    "token_embd_norm": "model.layers.0.pre_norm",
    "output_norm": "model.norm",
}
# Tensors of the recurrent layers and of mixtures that are no weights of a module: their names do
# not end in .weight.
_WITHOUT_WEIGHT_SUFFIX = (
    *(".x_x", ".x_k", ".k_k", ".k_a", ".r_k", ".lora.2.bias"),
    *(".mu", ".x_proj.2.bias", "attn.bonus", *(f"attn.x_{part}.bias" for part in "rwkvg")),
)
RWKV_6 = GgufArch(
    "RWKV6ForCausalLM",
    "rwkv6",
    {
        **_TIME_6,
        **_CHANNELS,
        "channel_mix_lerp_k": "ffn.key.mu",
        "channel_mix_lerp_r": "ffn.receptance.mu",
        "channel_mix_key": "ffn.key.linear",
        "channel_mix_receptance": "ffn.receptance.linear",
    },
    _rwkv6,
    eps="norm_eps",
    layer_norm=True,
    top=_TOP,
    states=True,
    bare=_WITHOUT_WEIGHT_SUFFIX,
)
QRWKV_6 = GgufArch(
    "RWKV6Qwen2ForCausalLM",
    "rwkv6qwen2",
    _TIME_6,
    _rwkv6qwen2,
    states=True,
    bare=_WITHOUT_WEIGHT_SUFFIX,
)
RWKV_7 = GgufArch(
    "RWKV7ForCausalLM",
    "rwkv7",
    {
        **_TIME,
        **_CHANNELS,
        "channel_mix_lerp_k": "ffn.x_k",
        "channel_mix_key": "ffn.key",
    },
    _rwkv7,
    eps="norm_eps",
    layer_norm=True,
    top=_TOP,
    states=True,
    bare=_WITHOUT_WEIGHT_SUFFIX,
)
ARWKV_7 = GgufArch(
    "RwkvHybridForCausalLM", "rwkv_hybrid", _TIME, _arwkv7, states=True, bare=_WITHOUT_WEIGHT_SUFFIX
)
