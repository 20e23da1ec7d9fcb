"""Command R and Aya (Cohere), and Command R7B and A (Cohere 2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cpuserve.models.config import read_bool, read_float, read_int, read_windows, refuse
from cpuserve.models.llama import build_decoder, paired_attention, read_decoder
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId


class Cohere:
    """Command R: attention and MLP read the same input. Source: transformers modeling_cohere."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Cohere config."""
        if read_bool(config, "use_qk_norm", False):
            refuse("use_qk_norm", True, "false: norms of each head (Command R+) are not supported")
        return read_cohere({"rope_theta": 500000.0, **config}, {})

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        _build(b, s)


class Cohere2:
    """Command R7B: three layers with a window and RoPE, then a layer with neither, and so on.

    Source: transformers modeling_cohere2.
    """

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Cohere 2 config."""
        pattern = read_int(config, "sliding_window_pattern", 4)
        window = read_int(config, "sliding_window", 4096, low=0)
        windows = read_windows(config, window, default=lambda i: (i + 1) % pattern > 0)
        no_rope = tuple(i for i, window in enumerate(windows) if not window)
        extra: dict[str, object] = {"windows": windows, "no_rope": no_rope}
        return read_cohere(config, extra)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        _build(b, s)


def read_cohere(config: Mapping[str, Any], extra: dict[str, object]) -> ModelSpec:
    """Return the hyperparameters that all Cohere models share."""
    bias = read_bool(config, "attention_bias", False)
    tied = config.get("tie_word_embeddings")
    spec = read_decoder(
        {
            **config,
            "tie_word_embeddings": True if tied is None else tied,
            "layer_norm_eps": config.get("layer_norm_eps") or 1e-5,
        },
        positions=8192,
        qkv_bias=bias,
        out_bias=bias,
        extra=extra,
        eps="layer_norm_eps",
    )
    return replace(spec, logit_scale=read_float(config, "logit_scale", 0.0625))


def cohere_norm(b: Builder, x: ValueId, name: str) -> ValueId:
    """Return the layer norm of x, without bias."""
    return b.layer_norm(x, name, bias=False)


def _build(b: Builder, s: ModelSpec) -> None:
    build_decoder(b, s, attention=paired_attention, norm=cohere_norm, parallel=True)
