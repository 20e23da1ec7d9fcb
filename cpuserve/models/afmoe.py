"""AFMoE (Arcee Trinity): gated attention, norms around each part, and experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cpuserve.models.config import read_bool, read_float, read_int, read_windows
from cpuserve.models.experts import add_mixture, read_experts
from cpuserve.models.llama import attend, build_sandwich, gated_mlp, plain_mlp, read_decoder
from cpuserve.models.parts import SpecParts
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId

NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_mlp_layernorm",
    "post_mlp_layernorm",
)


class Afmoe:
    """Trinity Nano and Mini: only layers with a window have a RoPE. Source: modeling_afmoe."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in an AFMoE config."""
        every = read_int(config, "global_attn_every_n_layers", 4)
        window = read_int(config, "sliding_window", 1024)
        windows = read_windows(config, window, default=lambda i: (i + 1) % every > 0)
        parts: SpecParts = {
            "windows": windows,
            "no_rope": tuple(i for i, keys in enumerate(windows) if not keys),
            **read_experts(config, count="num_experts", width="moe_intermediate_size"),
            "shared": read_int(config, "num_shared_experts", low=0),
            "dense_layers": tuple(range(min(read_int(config, "num_dense_layers", low=0), 4096))),
            "expert_scale": read_float(config, "route_scale", 1.0),
        }
        bias = read_bool(config, "attention_bias", False)
        spec = read_decoder(
            {"rms_norm_eps": 1e-5, **config, "head_dim": read_int(config, "head_dim", 128)},
            positions=16384,
            qkv_bias=bias,
            out_bias=bias,
            parts=parts,
        )
        scaled = read_bool(config, "mup_enabled", False)
        return replace(spec, embed_scale=float(spec.width**0.5) if scaled else 1.0)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        build_sandwich(b, s, attention=_attention, norms=NORMS, mlp=_mlp)


def _attention(b: Builder, s: ModelSpec, layer: int, h: ValueId) -> ValueId:
    """Return the attention of h, where the sigmoid of a linear of h multiplies each column."""
    a = attend(b, s, layer, h, qk_norm=True)
    gates = b.linear(
        h, f"model.layers.{layer}.self_attn.gate_proj", features=s.q_heads * s.head_dim
    )
    b.gate(gates, to=a)
    return a


def _mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, to: ValueId | None) -> ValueId:
    """Return the layer's experts of h plus the shared expert; a plain MLP in the first layers."""
    if layer in s.parts["dense_layers"]:
        return plain_mlp(b, s, layer, h, to)
    at = f"model.layers.{layer}.mlp"
    total = add_mixture(
        b,
        s,
        at,
        h,
        to,
        parts=("gate_proj", "up_proj", "down_proj"),
        renormalize=True,
        score="sigmoid",
        scale=s.parts["expert_scale"],
        bias=f"{at}.expert_bias",
        router="router.gate",
    )
    shared = s.parts["shared"] * s.parts["expert_width"]
    if shared:
        gated_mlp(b, s, f"{at}.shared_experts", h, shared, to=total)
    return total
