"""Qwen2, Qwen2.5 and Qwen3 (dense)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cpuserve.models.base import DECODER_HEAD, GGUF_HEAD
from cpuserve.models.config import read_bool, read_int, read_windows
from cpuserve.models.llama import build_decoder, qk_norm_attention, read_decoder
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder


class Qwen2:
    """Llama with biases on q, k and v. Source: transformers modeling_qwen2."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Qwen2 config; without a causal mask it is an encoder."""
        spec = read_decoder(
            config,
            positions=32768,
            qkv_bias=True,
            **read_qwen_windows(config),
        )
        # The configs of gte-Qwen2 (is_causal: false) say that tokens attend to later tokens.
        both_sides = not read_bool(config, "is_causal", True)
        return replace(spec, encoder=both_sides, pooled=both_sides)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        b.leave((*DECODER_HEAD, "lm_head.weight") if s.encoder else DECODER_HEAD)
        build_decoder(b, s)


def read_qwen_windows(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the windows of a Qwen config as arguments of read_decoder.

    The argument is `window` if all layers have the same window, else `extra["windows"]`;
    {} without windows. Windows are used only if use_sliding_window is true,
    in layers that layer_types marks as "sliding_attention";
    without layer_types, in layers from max_window_layers on.
    """
    window = read_int(config, "sliding_window", 4096, low=0)
    if (
        not read_bool(config, "use_sliding_window", False)
        or config.get("sliding_window", 1) is None
    ):
        return {}
    first = read_int(config, "max_window_layers", 28, low=0)
    windows = read_windows(config, window, default=lambda layer: layer >= first)
    if len({*windows}) == 1:
        return {"window": windows[0]}
    return {"extra": {"windows": windows}}


class Qwen3:
    """Llama with an RMS norm on every q and k head. Source: transformers modeling_qwen3."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Qwen3 config; head_dim is 128 by default at any width."""
        bias = read_bool(config, "attention_bias", False)
        head_dim = config.get("head_dim") or 128
        return read_decoder(
            {**config, "head_dim": head_dim},
            positions=32768,
            qkv_bias=bias,
            out_bias=bias,
            **read_qwen_windows(config),
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        b.leave([*DECODER_HEAD, *(f"{name}.weight" for name in GGUF_HEAD)])
        build_decoder(b, s, attention=qk_norm_attention)
