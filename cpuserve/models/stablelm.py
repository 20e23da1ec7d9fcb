"""StableLM 2 and 3B: Llama with layer norms, and a quarter of each head rotated; and Orion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from cpuserve.models.config import read_bool
from cpuserve.models.head_norms import head_norm_attention
from cpuserve.models.llama import (
    build_decoder,
    layer_norm,
    read_decoder,
    self_attention,
)
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import Joined, ValueId


class StableLm:
    """Layer norms; attention and MLP may read the same input. Source: modeling_stablelm."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a StableLM config, in both spellings."""
        share = config.get("partial_rotary_factor", config.get("rope_pct"))
        eps = config.get("norm_eps")
        return read_decoder(
            {
                "layer_norm_eps": 1e-5 if eps is None else eps,
                **config,
                "partial_rotary_factor": 0.25 if share is None else share,
                "head_dim": None,  # a key that transformers does not read
            },
            positions=4096,
            qkv_bias=read_bool(config, "use_qkv_bias", False),
            extra={
                "parallel": read_bool(config, "use_parallel_residual", False),
                "head_norm": read_bool(config, "qk_layernorm", False),
                "joined": read_bool(config, "joined_head_norms", False),  # in GGUF files
            },
            eps="layer_norm_eps",
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        attention = _normed_attention if s.extra["head_norm"] else self_attention
        parallel = cast("bool", s.extra["parallel"])
        build_decoder(b, s, attention=attention, norm=layer_norm, parallel=parallel)


class Orion:
    """Orion 14B: StableLM with whole heads rotated. Source: llama.cpp orion.cpp.

    The epsilon of its layer norms is called rms_norm_eps.
    """

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in an Orion config."""
        eps = config.get("rms_norm_eps")
        return StableLm.spec(
            {
                **config,
                "layer_norm_eps": 1e-5 if eps is None else eps,
                "partial_rotary_factor": 1.0,
                **dict.fromkeys(("use_qkv_bias", "use_parallel_residual", "qk_layernorm"), False),
            }
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        StableLm.build(b, s)


def _normed_attention(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's attention of h to x; each head of q and k has a layer norm (12B)."""
    at, norms = f"model.layers.{layer}.self_attn", list[Joined]()
    for part, count in (("q", s.q_heads), ("k", s.kv_heads)):
        each = tuple(f"{at}.{part}_layernorm.norms.{i}" for i in range(count))
        norms.append(f"{at}.{part}_norm" if s.extra["joined"] else each)
    head_norm_attention(b, s, layer, h, x, q=norms[0], k=norms[1])
