"""Seed-OSS: Llama with biases of queries, keys and values, and heads of 128."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.models.config import read_bool, read_int
from cpuserve.models.llama import build_decoder, read_decoder
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder


class SeedOss:
    """Seed-OSS 36B. Source: transformers modeling_seed_oss."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Seed-OSS config."""
        return read_decoder(
            {**config, "head_dim": read_int(config, "head_dim", 128)},
            positions=524288,
            qkv_bias=read_bool(config, "attention_bias", True),
            out_bias=read_bool(config, "attention_out_bias", False),
            mlp_bias=read_bool(config, "mlp_bias", False),
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        build_decoder(b, s)
