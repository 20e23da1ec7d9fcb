"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts, and one that all tokens share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.models.base import register_model
from cpuserve.models.config import read_bool, read_int
from cpuserve.models.experts import read_experts, read_sparse_step
from cpuserve.models.llama import build_decoder, read_decoder
from cpuserve.models.qwen2 import read_qwen_windows
from cpuserve.models.qwen3_moe import qwen_shared_mlp
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder


@register_model("Qwen2MoeForCausalLM")
class Qwen2Moe:
    """The shared expert has a gate of its own. Source: transformers modeling_qwen2_moe."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """The hyperparameters in a Qwen2-MoE config."""
        layers = read_int(config, "num_hidden_layers", high=4096)
        more = read_qwen_windows(config)
        extra = {
            **more.pop("extra", {}),
            **read_experts(config, count="num_experts", width="moe_intermediate_size"),
            "renormalize": read_bool(config, "norm_topk_prob", False),
            "dense_layers": read_sparse_step(config, layers),
            "shared_width": read_int(config, "shared_expert_intermediate_size", high=1 << 24),
        }
        return read_decoder(
            config,
            architecture="Qwen2MoeForCausalLM",
            positions=32768,
            qkv_bias=read_bool(config, "qkv_bias", True),
            extra=extra,
            **more,
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the ops of the model to `b`."""
        build_decoder(b, s, mlp=qwen_shared_mlp)
