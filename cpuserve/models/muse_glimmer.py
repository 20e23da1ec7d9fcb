"""Muse Glimmer (text): Gemma 2 with gated attention, and norms of q and k that have no weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cpuserve.models.config import read_bool, read_float, read_int, read_windows, refuse
from cpuserve.models.gemma import NORMS, read_cap
from cpuserve.models.llama import (
    finish_decoder,
    heads_of,
    layer_rope,
    layer_window,
    plain_mlp,
    read_decoder,
)
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId


class MuseGlimmer:
    """Muse Glimmer 30B (text): only layers with a window have a RoPE.

    Source: transformers modeling_muse_glimmer.

    Keys of ModelSpec.parts: post_eps, the epsilon of the norms after attention and MLP; cap, the
    soft cap of the logits.
    """

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in the config of the text part of a Muse Glimmer."""
        layers = read_int(config, "num_hidden_layers", high=4096)
        # Counted from the last layer, every fourth layer has neither a window nor a RoPE.
        is_full = [(layers - 1 - i) % 4 == 0 for i in range(layers)]
        window = read_int(config, "sliding_window", 2048)
        bias = read_bool(config, "attention_bias", False)
        spec = read_decoder(
            {
                "rms_norm_eps": 1e-5,
                **config,
                "head_dim": read_int(config, "head_dim", 128),
                "hidden_act": config.get("hidden_activation", "silu"),
            },
            positions=131072,
            qkv_bias=bias,
            out_bias=bias,
            parts={
                "windows": read_windows(config, window, default=lambda i: not is_full[i]),
                "no_rope": _without_rope(config, is_full),
                "post_eps": read_float(config, "post_norm_eps", 1e-8),
                "cap": read_cap(config, "final_logit_softcapping", 20.0),
            },
        )
        factor = read_float(config, "qk_scale_factor", 3.87)
        return replace(
            spec,
            attention_scale=factor * spec.head_dim**-0.5,
            logit_scale=read_float(config, "output_multiplier", 0.19611613513818404),
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        x = b.rms_norm(b.embed("model.embed_tokens"), "embeddings", weightless=True)
        post_eps = s.parts["post_eps"]
        for layer in range(s.layers):
            prefix = f"model.layers.{layer}"
            # GGUF files have the factor of queries here, which is in parts as well.
            b.leave(f"{prefix}.self_attn.{part}_norm.weight" for part in "qk")
            before_attention, after_attention, before_mlp, after_mlp = (
                f"{prefix}.{norm}" for norm in NORMS
            )
            a = _attention(b, s, layer, b.rms_norm(x, before_attention, plus_one=True))
            o = b.linear(
                a, f"{prefix}.self_attn.o_proj", features=s.width, bias=s.out_bias, use="output"
            )
            b.add(b.rms_norm(o, after_attention, plus_one=True, eps=post_eps), to=x)
            o = plain_mlp(b, s, layer, b.rms_norm(x, before_mlp, plus_one=True), None)
            b.add(b.rms_norm(o, after_mlp, plus_one=True, eps=post_eps), to=x)
        finish_decoder(b, s, b.rms_norm(x, "model.norm"), softcap=s.parts["cap"])


def _without_rope(config: Mapping[str, Any], default: list[bool]) -> tuple[int, ...]:
    """Return the layers without a RoPE: layer_rope_theta is 0; all others share rope_theta."""
    if config.get("layer_rope_theta") is None:
        return tuple(layer for layer, is_plain in enumerate(default) if is_plain)
    thetas = config["layer_rope_theta"]
    if not isinstance(thetas, list) or len(thetas) != len(default):
        refuse("layer_rope_theta", thetas, f"a list of {len(default)} numbers, one for a layer")
    return tuple(layer for layer, theta in enumerate(thetas) if not theta)


def _attention(b: Builder, s: ModelSpec, layer: int, h: ValueId) -> ValueId:
    """Return the attention of h, where the sigmoid of a linear of h multiplies each column."""
    prefix, d = f"model.layers.{layer}.self_attn", s.head_dim
    qkv = heads_of(b, s, prefix, h)
    b.part_norm(qkv, None, width=d, parts=s.q_heads + s.kv_heads)
    b.rope_store_kv(qkv, layer=layer, rope=layer_rope(s, layer))
    window = layer_window(s, layer)
    a = b.attention(qkv, layer=layer, window=window, scale=s.attention_scale)
    b.gate(b.linear(h, f"{prefix}.gate_proj", features=s.q_heads * d), to=a)
    return a
