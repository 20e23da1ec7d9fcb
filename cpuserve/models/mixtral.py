"""Mixtral: Mistral with mixtures of experts as feed-forward layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.models.config import read_int
from cpuserve.models.experts import add_mixture, read_experts
from cpuserve.models.llama import build_decoder, read_decoder
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId


class Mixtral:
    """Mistral with experts; their weights add up to 1. Source: transformers modeling_mixtral."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Mixtral config, which has no window by default."""
        return read_decoder(
            {
                **config,
                "rope_theta": config.get("rope_theta") or 1e6,
                "rms_norm_eps": config.get("rms_norm_eps") or 1e-5,
            },
            positions=131072,
            window=read_int(config, "sliding_window", 0, low=0),
            extra=read_experts(config, count="num_local_experts", width="intermediate_size"),
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        build_decoder(b, s, mlp=_mlp)


def _mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    at = f"model.layers.{layer}.block_sparse_moe"
    add_mixture(b, s, at, h, x, parts=("w1", "w3", "w2"), renormalize=True)
