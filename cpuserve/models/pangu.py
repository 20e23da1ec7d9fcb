"""openPangu Embedded: Llama with biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.models.config import read_bool, refuse
from cpuserve.models.llama import build_decoder, read_decoder
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder


class PanguEmbedded:
    """openPangu Embedded 1B and 7B: Llama with biases. Source: llama.cpp pangu-embed.cpp."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in an openPangu config.

        Raises ModelError for layers of the mixtures, which other openPangu models have.
        """
        for key in ("param_sink_number", "sandwich_norm", "kv_lora_rank", "num_routed_experts"):
            if config.get(key):
                refuse(key, config[key], "absent: only openPangu Embedded 1B and 7B are supported")
        bias = read_bool(config, "attention_bias", False) or read_bool(config, "bias", False)
        return read_decoder(
            config,
            positions=32768,
            qkv_bias=read_bool(config, "qkv_bias", bias),
            out_bias=bias,
            mlp_bias=read_bool(config, "mlp_bias", False),
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        build_decoder(b, s)
