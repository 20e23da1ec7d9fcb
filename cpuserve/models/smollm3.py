"""SmolLM3: Llama, where some layers have no rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.models.config import read_bool, read_flags, read_int, read_windows
from cpuserve.models.llama import build_decoder, read_decoder
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder


class SmolLm3:
    """Llama without RoPE in every fourth layer. Source: transformers modeling_smollm3."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a SmolLM3 config.

        no_rope_layers has a 1 for layers that have a RoPE, in spite of its name.
        """
        interval = read_int(config, "no_rope_layer_interval", 4)
        rotated = read_flags(config, "no_rope_layers", lambda i: (i + 1) % interval != 0)
        window = 0
        if read_bool(config, "use_sliding_window", False) and config.get("sliding_window"):
            window = read_int(config, "sliding_window")
        tied = config.get("tie_word_embeddings")
        bias = read_bool(config, "attention_bias", False)
        return read_decoder(
            {
                "rope_theta": 2000000.0,
                **config,
                "tie_word_embeddings": True if tied is None else tied,
            },
            positions=32768,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=read_bool(config, "mlp_bias", False),
            extra={
                "no_rope": tuple(i for i, flag in enumerate(rotated) if not flag),
                "windows": read_windows(
                    {**config, "sliding_window": window or None},
                    window,
                    default=lambda i: not rotated[i],
                ),
            },
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        build_decoder(b, s)
