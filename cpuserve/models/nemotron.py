"""Nemotron 3 and 4 and Minitron (dense), and Jais 2: layer norms, and squares of ReLUs in MLPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.models.config import read_bool, read_choice
from cpuserve.models.llama import build_decoder, layer_norm, read_decoder, squared_mlp
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId


class Nemotron:
    """Nemotron-4 and Minitron: half of a head is rotated. Source: modeling_nemotron."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Nemotron config."""
        share = config.get("partial_rotary_factor")
        half = {"partial_rotary_factor": 0.5 if share is None else share}
        return _spec({"norm_eps": 1e-5, **config, **half}, 4096, bias=False, eps="norm_eps")

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        build_decoder(b, s, mlp=_mlp, norm=_offset_layer_norm)


class Jais2:
    """Jais 2: Nemotron with plain layer norms and whole heads rotated. Source: modeling_jais2."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Jais 2 config."""
        return _spec({"layer_norm_eps": 1e-5, **config}, 8192, bias=True, eps="layer_norm_eps")

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        build_decoder(b, s, mlp=_mlp, norm=layer_norm)


def _spec(config: Mapping[str, Any], positions: int, *, bias: bool, eps: str) -> ModelSpec:
    read_choice(config, "hidden_act", "relu2", {"relu2": "relu2"})
    attention_bias = read_bool(config, "attention_bias", bias)
    return read_decoder(
        {**config, "hidden_act": "silu"},
        positions=positions,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=read_bool(config, "mlp_bias", bias),
        eps=eps,
    )


def _offset_layer_norm(b: Builder, x: ValueId, name: str) -> ValueId:
    """Return the layer norm of x, with weights that are stored as offsets from 1."""
    return b.layer_norm(x, name, plus_one=True)


def _mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    squared_mlp(b, s, f"model.layers.{layer}.mlp", h, s.intermediate, x)
