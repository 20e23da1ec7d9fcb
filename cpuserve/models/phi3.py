"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: Llama with fused matrices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.models.config import read_int
from cpuserve.models.llama import build_decoder, fused_attention, fused_mlp, read_decoder
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder


class Phi3:
    """Phi-3, 3.5 and 4: q, k and v are one matrix, gate and up another. Source: modeling_phi3."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Phi-3 config.

        LongRoPE uses one set of factors for all sequences (`long_rope` of EngineConfig).
        """
        window = read_int(config, "sliding_window", 0, low=0)
        return read_decoder(
            {"rms_norm_eps": 1e-5, **config},
            positions=4096,
            window=window,
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        build_decoder(b, s, attention=fused_attention, mlp=fused_mlp)
