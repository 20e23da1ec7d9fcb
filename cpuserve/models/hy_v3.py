"""Hunyuan 3: the attention of Qwen3 with experts chosen by a sigmoid and a bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from cpuserve.models.config import read_bool, read_float, read_int
from cpuserve.models.experts import add_mixture, read_dense_layers, read_experts
from cpuserve.models.llama import (
    build_decoder,
    dense_mlp,
    gated_mlp,
    qk_norm_attention,
    read_decoder,
)
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import StoredNames
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId


class HunYuan3:
    """Hunyuan 3: chosen experts and a shared one. Source: transformers modeling_hy_v3."""

    stored = StoredNames(
        {
            r"\.mlp\.gate\.": ".mlp.router.gate.",
            r"\.mlp\.e_score_correction_bias": ".mlp.expert_bias",
            r"\.mlp\.shared_experts\.": ".mlp.shared_mlp.",
        }
    )

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Hunyuan 3 config."""
        bias = read_bool(config, "attention_bias", False)
        counted = {"num_experts": 192, "num_experts_per_tok": 8, "moe_intermediate_size": 1536}
        counted |= {key: value for key, value in config.items() if value is not None}
        return read_decoder(
            {
                "head_dim": 128,
                "rms_norm_eps": 1e-5,
                "rope_theta": 11158840.0,
                "num_key_value_heads": 8,
                **config,
            },
            positions=131072,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=read_bool(config, "mlp_bias", False),
            extra={
                **read_experts(counted, count="num_experts", width="moe_intermediate_size"),
                "shared": read_int(config, "num_shared_experts", 1),
                "dense_layers": read_dense_layers(config, first=1),
                "expert_scale": read_float(config, "router_scaling_factor", 2.826),
            },
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        build_decoder(b, s, attention=qk_norm_attention, mlp=_mlp)


def _mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's experts of h to x; the first layers have a plain MLP."""
    at = f"model.layers.{layer}.mlp"
    if layer in cast("tuple[int, ...]", s.extra["dense_layers"]):
        dense_mlp(b, s, layer, h, x)
        return
    out = add_mixture(
        b,
        s,
        at,
        h,
        x,
        parts=("gate_proj", "up_proj", "down_proj"),
        renormalize=True,
        score="sigmoid",
        scale=cast("float", s.extra["expert_scale"]),
        bias=f"{at}.expert_bias",
        router="router.gate",
    )
    shared = cast("int", s.extra["shared"]) * cast("int", s.extra["expert_width"])
    gated_mlp(b, s, f"{at}.shared_mlp", h, shared, to=out)
