"""ERNIE 4.5 (text, dense): Llama with a RoPE of neighbouring dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.models.base import register_model
from cpuserve.models.config import read_bool, read_int
from cpuserve.models.llama import build_decoder, paired_attention, read_decoder
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder


@register_model("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM")
class Ernie45:
    """ERNIE 4.5 0.3B. Source: transformers modeling_ernie4_5."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """The hyperparameters in an ERNIE 4.5 config."""
        bias = read_bool(config, "use_bias", False)
        return read_decoder(
            {
                "rms_norm_eps": 1e-5,
                "rope_theta": 500000.0,
                "tie_word_embeddings": True,
                **{key: value for key, value in config.items() if value is not None},
                "head_dim": read_int(config, "head_dim", 128),
            },
            architecture="Ernie4_5ForCausalLM",
            positions=131072,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=bias,
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the ops of the model to `b`."""
        build_decoder(b, s, attention=paired_attention)
