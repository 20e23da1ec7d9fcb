"""DeepSeek MoE (the first DeepSeek with experts): Llama with experts chosen by a softmax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from cpuserve.models.config import read_bool, read_choice, read_float, read_int
from cpuserve.models.experts import add_shared_mixture, read_dense_layers, read_experts
from cpuserve.models.llama import build_decoder, dense_mlp, read_decoder
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId


class DeepseekMoe:
    """DeepSeek MoE 16B: Llama with chosen and shared experts. Source: llama.cpp deepseek.cpp."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a DeepSeek MoE config."""
        read_choice(config, "scoring_func", "softmax", {"softmax": "softmax"})
        given = {key: value for key, value in config.items() if value is not None}
        first = read_int(given, "first_k_dense_replace", 0, low=0)
        every = read_int(given, "moe_layer_freq", 1)
        bias = read_bool(given, "attention_bias", False)
        return read_decoder(
            given,
            positions=2048,
            qkv_bias=bias,
            out_bias=bias,
            extra={
                **read_experts(given, count="n_routed_experts", width="moe_intermediate_size"),
                "shared": read_int(given, "n_shared_experts", 0, low=0),
                "dense_layers": read_dense_layers(given, first=first, every=every),
                "renormalize": read_bool(given, "norm_topk_prob", False),
                "expert_scale": read_float(given, "routed_scaling_factor", 1.0),
                "groups": None,
            },
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        build_decoder(b, s, mlp=_mlp)


def _mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's experts of h to x; the first layers have a plain MLP."""
    if layer in cast("tuple[int, ...]", s.extra["dense_layers"]):
        dense_mlp(b, s, layer, h, x)
    else:
        add_shared_mixture(b, s, f"model.layers.{layer}.mlp", h, x, score="softmax")
