"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with routed experts, and an expert that all tokens share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.models.config import read_bool, read_qwen_windows
from cpuserve.models.llama import build_decoder, read_decoder
from cpuserve.models.qwen3_moe import qwen_shared_mlp, read_shared_experts
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder


class Qwen2Moe:
    """Qwen2 with routed experts, and a gated expert that all tokens share.

    Source: transformers modeling_qwen2_moe.
    """

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Qwen2-MoE config."""
        more = read_qwen_windows(config)
        renormalize = read_bool(config, "norm_topk_prob", False)
        extra = {**more.pop("extra", {}), **read_shared_experts(config, renormalize=renormalize)}
        return read_decoder(
            config,
            positions=32768,
            qkv_bias=read_bool(config, "qkv_bias", True),
            extra=extra,
            **more,
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        build_decoder(b, s, mlp=qwen_shared_mlp)
