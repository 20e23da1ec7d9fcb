"""Flint: Qwen3-MoE with attention sinks, windows, and experts chosen by sigmoids."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from cpuserve.models.config import read_bool, read_int, read_windows
from cpuserve.models.experts import add_mixture, read_shared_experts
from cpuserve.models.llama import build_decoder, dense_mlp, gated_mlp, read_decoder, self_attention
from cpuserve.models.parts import SpecParts
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import StoredNames
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId


class Flint:
    """Flint: only layers with a window have a RoPE. Source: transformers modeling_flint."""

    stored = StoredNames(published={r"\.self_attn\.softmax_offset": ".self_attn.sinks"})

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Flint config."""
        defaults = {
            "num_experts": 256,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 1024,
            "num_key_value_heads": 4,
            "head_dim": 128,
        }
        config = {**defaults, **{key: value for key, value in config.items() if value is not None}}
        config = {"mlp_only_layers": [0, 1], **config}
        last = read_int(config, "num_hidden_layers", high=4096) - 1
        window = read_int(config, "sliding_window", 513)
        windows = read_windows(
            config, window, default=lambda i: i >= 2 and i % 4 != 1 and i != last
        )
        renormalize = read_bool(config, "norm_topk_prob", True)
        parts: SpecParts = {
            **read_shared_experts(config, renormalize=renormalize),
            "windows": windows,
            "no_rope": tuple(i for i, keys in enumerate(windows) if not keys),
        }
        bias = read_bool(config, "attention_bias", False)
        return read_decoder(config, positions=262144, qkv_bias=bias, out_bias=bias, parts=parts)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        attention = partial(self_attention, qk_norm=True, sinks=True)
        build_decoder(b, s, attention=attention, mlp=_mlp)


def _mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add to x the experts of h, chosen and shared, or the plain MLP of h."""
    at = f"model.layers.{layer}.mlp"
    if layer in s.parts["dense_layers"]:
        dense_mlp(b, s, layer, h, x)
        return
    add_mixture(
        b,
        s,
        at,
        h,
        x,
        parts=("gate_proj", "up_proj", "down_proj"),
        renormalize=s.parts["renormalize"],
        score="sigmoid",
    )
    gated_mlp(b, s, f"{at}.shared_expert", h, s.parts["shared_width"], to=x)
