"""Mellum 2: Qwen3-MoE with a second RoPE for layers with a window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.models.config import read_bool, read_int, read_windows
from cpuserve.models.experts import read_dense_layers, read_experts
from cpuserve.models.llama import build_decoder, qk_norm_attention, read_decoder
from cpuserve.models.qwen3_moe import qwen_mlp
from cpuserve.models.rope import split_ropes
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder


class Mellum:
    """JetBrains' models for code: experts, and layers with a window. Source: modeling_mellum."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Mellum config.

        Layers have a window if layer_types says so, and a dense MLP if mlp_layer_types says so;
        without these keys, no layer has a window or a dense MLP.
        """
        bias = read_bool(config, "attention_bias", False)
        window = read_int(config, "sliding_window", 1024, low=0)
        head_dim = read_int(config, "head_dim", 128)
        extra = {
            "windows": read_windows(config, window, default=lambda _: False),
            "dense_layers": read_dense_layers(config),
            "renormalize": read_bool(config, "norm_topk_prob", True),
            **read_experts(config, count="num_experts", width="moe_intermediate_size"),
        }
        config, extra["local_rope"] = split_ropes(
            config, head_dim, 131072, theta=500000.0, local_theta=10000.0
        )
        return read_decoder(
            {**config, "head_dim": head_dim},
            positions=131072,
            qkv_bias=bias,
            out_bias=bias,
            extra=extra,
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        build_decoder(b, s, attention=qk_norm_attention, mlp=qwen_mlp)
