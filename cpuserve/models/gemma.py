"""Gemma 2 and 3 (text): norms before and after each part, and local and global attention."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, cast

from cpuserve.models.base import register_model
from cpuserve.models.config import read_bool, read_float, read_int, read_windows, refuse
from cpuserve.models.llama import layer_rope, read_decoder
from cpuserve.models.rope import split_ropes
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import Then


@register_model("Gemma2ForCausalLM")
class Gemma2:
    """Gemma 2: soft caps, and every second layer local. Source: transformers modeling_gemma2."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """The hyperparameters in a Gemma 2 config."""
        caps = {"softcap": _cap(config, "attn_logit_softcapping", 50.0)}
        return _spec(config, "Gemma2ForCausalLM", 8192, pattern=2, logit_cap=30.0, extra=caps)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the ops of the model to `b`."""
        _build(b, s, qk_norm=False)


@register_model("Gemma3ForCausalLM")
class Gemma3:
    """Gemma 3, text: q and k norms, five local layers for each global one, with a RoPE base each.

    Source: transformers modeling_gemma3.
    """

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """The hyperparameters in a Gemma 3 text config."""
        config, local_rope = split_ropes(
            config,
            read_int(config, "head_dim", 256),
            131072,
            theta=1e6,
            local_theta=config.get("rope_local_base_freq", 1e4),
        )
        return _spec(
            config,
            "Gemma3ForCausalLM",
            131072,
            pattern=read_int(config, "sliding_window_pattern", 6),
            logit_cap=0.0,
            extra={"local_rope": local_rope},
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the ops of the model to `b`."""
        _build(b, s, qk_norm=True)


def _spec(
    config: Mapping[str, Any],
    architecture: str,
    positions: int,
    *,
    pattern: int,
    logit_cap: float,
    extra: Mapping[str, object],
) -> ModelSpec:
    """What both have in common; pattern: every how many layers one is global, if not listed."""
    if config.get("use_bidirectional_attention"):
        refuse("use_bidirectional_attention", True, "false: only causal attention is supported")
    window = (
        0 if config.get("sliding_window", 1) is None else read_int(config, "sliding_window", 4096)
    )
    tied = config.get("tie_word_embeddings")
    bias = read_bool(config, "attention_bias", False)
    return read_decoder(
        {
            **config,
            "head_dim": read_int(config, "head_dim", 256),
            "hidden_act": config.get("hidden_activation") or "gelu_pytorch_tanh",
            "tie_word_embeddings": True if tied is None else tied,
        },
        architecture=architecture,
        positions=positions,
        qkv_bias=bias,
        out_bias=bias,
        extra={
            "windows": read_windows(config, window, default=lambda i: (i + 1) % pattern > 0),
            "scale": read_float(config, "query_pre_attn_scalar", 256.0) ** -0.5,
            "logit_softcap": _cap(config, "final_logit_softcapping", logit_cap),
            **extra,
        },
    )


def _cap(config: Mapping[str, Any], key: str, default: float) -> float:
    """A soft cap; null in the config means none."""
    return 0.0 if config.get(key, default) in (None, 0) else read_float(config, key, default)


def _embed_scale(s: ModelSpec) -> float:
    """The square root of the width, rounded to the dtype of the checkpoint as in transformers."""
    scale = float(s.width**0.5)
    if s.dtype == "float16":
        return float(struct.unpack("<e", struct.pack("<e", scale))[0])
    if s.dtype == "bfloat16":  # round to nearest even in the upper 16 bits
        bits = int(struct.unpack("<I", struct.pack("<f", scale))[0])
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
        return float(struct.unpack("<f", struct.pack("<I", bits))[0])
    return scale


def _build(b: Builder, s: ModelSpec, *, qk_norm: bool) -> None:
    d, then = s.head_dim, cast("Then", f"{s.activation}_mul")
    qkv_features = [s.q_heads * d, s.kv_heads * d, s.kv_heads * d]
    windows = cast("tuple[int, ...]", s.extra["windows"])
    x = b.embed("model.embed_tokens", scale=_embed_scale(s))
    for i, window in enumerate(windows):
        layer = f"model.layers.{i}"
        at, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        h = b.rms_norm(x, f"{layer}.input_layernorm", plus_one=True)
        qkv = b.linear(h, [f"{at}.{n}_proj" for n in "qkv"], features=qkv_features, bias=s.qkv_bias)
        b.rope_store_kv(
            qkv,
            layer=i,
            rope=layer_rope(s, window),
            q_norm=f"{at}.q_norm" if qk_norm else None,
            k_norm=f"{at}.k_norm" if qk_norm else None,
            plus_one=True,
        )
        a = b.attention(
            qkv,
            layer=i,
            window=window,
            scale=cast("float", s.extra["scale"]),
            softcap=cast("float", s.extra.get("softcap", 0.0)),
        )
        o = b.linear(a, f"{at}.o_proj", features=s.width, bias=s.out_bias)
        b.add(b.rms_norm(o, f"{layer}.post_attention_layernorm", plus_one=True), to=x)
        h = b.rms_norm(x, f"{layer}.pre_feedforward_layernorm", plus_one=True)
        g = b.linear(h, [f"{mlp}.gate_proj", f"{mlp}.up_proj"], features=s.intermediate, then=then)
        o = b.linear(g, f"{mlp}.down_proj", features=s.width)
        b.add(b.rms_norm(o, f"{layer}.post_feedforward_layernorm", plus_one=True), to=x)
    b.logits(
        b.rms_norm(x, "model.norm", plus_one=True),
        "lm_head",
        tied_to="model.embed_tokens" if s.tied else None,
        softcap=cast("float", s.extra["logit_softcap"]),
    )
