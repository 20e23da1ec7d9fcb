"""GGUF files of RWKV 7, and of ARWKV 7, which is Qwen2.5 with its recurrent layers."""

from __future__ import annotations

from typing import Any

from cpuserve.loader.gguf.archs.record import GgufArch
from cpuserve.loader.gguf.keys import Keys

HEAD_EPS = (
    64e-5  # of the norms of heads, whatever the width of heads and the epsilon of other norms
)
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


ARCHS = {
    "rwkv7": GgufArch(
        "RWKV7ForCausalLM",
        "rwkv7",
        {
            **_TIME,
            "attn_norm": "attn_norm",
            "attn_norm_2": "ffn_norm",
            "channel_mix_lerp_k": "ffn.x_k",
            "channel_mix_key": "ffn.key",
            "channel_mix_value": "ffn.value",
        },
        _rwkv7,
        eps="norm_eps",
        layer_norm=True,
        top={
            "token_embd": "model.embeddings",
            "token_embd_norm": "model.layers.0.pre_norm",
            "output_norm": "model.norm",
        },
        states=True,
    ),
    "arwkv7": GgufArch("RwkvHybridForCausalLM", "rwkv_hybrid", _TIME, _arwkv7, states=True),
}
