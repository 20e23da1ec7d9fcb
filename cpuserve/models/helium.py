"""Helium: Llama with a RoPE of neighbouring dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.models.config import read_bool, read_int, refuse
from cpuserve.models.llama import build_decoder, paired_attention, read_decoder
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder


class Helium:
    """Helium 1. Source: transformers modeling_helium."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Helium config."""
        width, head_dim = read_int(config, "hidden_size"), read_int(config, "head_dim", 128)
        if head_dim * read_int(config, "num_attention_heads") != width:
            refuse("head_dim", head_dim, "hidden_size / num_attention_heads, as in transformers")
        return read_decoder(
            {
                "rms_norm_eps": 1e-8,
                "rope_theta": 1e5,
                **config,
                "head_dim": head_dim,
            },
            positions=4096,
            qkv_bias=read_bool(config, "attention_bias", False),
            mlp_bias=read_bool(config, "mlp_bias", False),
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        build_decoder(b, s, attention=paired_attention)
