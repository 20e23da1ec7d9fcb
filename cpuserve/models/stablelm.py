"""StableLM 2 and StableLM 3B: Llama with layer norms, and a quarter of each head rotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from cpuserve.models.config import read_bool, refuse
from cpuserve.models.llama import build_decoder, layer_norm, read_decoder
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder


class StableLm:
    """Layer norms; attention and MLP may read the same input. Source: modeling_stablelm."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a StableLM config."""
        if read_bool(config, "qk_layernorm", False):
            refuse("qk_layernorm", True, "false: norms of each head (StableLM 2 12B) are missing")
        share = config.get("partial_rotary_factor")
        return read_decoder(
            {
                "layer_norm_eps": 1e-5,
                **config,
                "partial_rotary_factor": 0.25 if share is None else share,
                "head_dim": None,  # a key that transformers does not read
            },
            positions=4096,
            qkv_bias=read_bool(config, "use_qkv_bias", False),
            extra={"parallel": read_bool(config, "use_parallel_residual", False)},
            eps="layer_norm_eps",
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        build_decoder(b, s, norm=layer_norm, parallel=cast("bool", s.extra["parallel"]))
