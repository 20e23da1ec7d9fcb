"""dots.llm1: the attention of Qwen3 with the mixtures of experts of DeepSeek V3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.models.config import read_bool, read_float, read_int, read_windows
from cpuserve.models.experts import (
    read_experts,
    read_first_dense,
    read_groups,
    sigmoid_mixture,
)
from cpuserve.models.llama import build_decoder, qk_norm_attention, read_decoder
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder


class Dots1:
    """dots.llm1: experts chosen by a sigmoid and a bias. Source: transformers modeling_dots1."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a dots1 config."""
        bias = read_bool(config, "attention_bias", False)
        window = 0
        if config.get("sliding_window", 4096) is not None:
            window = read_int(config, "sliding_window", 4096, low=0)
        first = read_int(config, "max_window_layers", 62, low=0)
        return read_decoder(
            config,
            positions=2048,
            qkv_bias=bias,
            out_bias=bias,
            extra={
                "windows": read_windows(config, window, lambda i: window > 0 and i >= first),
                **read_experts(config, count="n_routed_experts", width="moe_intermediate_size"),
                "shared": read_int(config, "n_shared_experts", 1),
                "dense_layers": read_first_dense(config, 0),
                "groups": read_groups(config, (1, 1), best=2),
                "expert_scale": read_float(config, "routed_scaling_factor", 1.0),
                "renormalize": read_bool(config, "norm_topk_prob", False),
            },
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        build_decoder(b, s, attention=qk_norm_attention, mlp=sigmoid_mixture)
