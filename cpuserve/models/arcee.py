"""Arcee AFM: Llama with the square of a ReLU in its MLP, which has no gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.models.config import read_bool, read_choice
from cpuserve.models.llama import build_decoder, read_decoder, squared_mlp
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId


class Arcee:
    """AFM 4.5B. Source: transformers modeling_arcee."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in an Arcee config."""
        read_choice(config, "hidden_act", "relu2", {"relu2": "relu2"})
        bias = read_bool(config, "attention_bias", False)
        return read_decoder(
            {"rms_norm_eps": 1e-5, **config, "hidden_act": "silu"},
            positions=4096,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=read_bool(config, "mlp_bias", False),
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        build_decoder(b, s, mlp=_mlp)


def _mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    squared_mlp(b, s, f"model.layers.{layer}.mlp", h, s.intermediate, x)
