"""Qwen3 (dense)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.models.base import DECODER_HEAD, GGUF_HEAD
from cpuserve.models.config import read_bool
from cpuserve.models.llama import build_decoder, qk_norm_attention, read_decoder
from cpuserve.models.qwen2 import read_qwen_windows
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder


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
