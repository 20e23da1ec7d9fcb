"""Kolibri 1: EXAONE 4's attention, norms around each part, and experts chosen by their logits."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from cpuserve.models.config import read_bool, read_int, read_windows
from cpuserve.models.experts import add_mixture, read_experts
from cpuserve.models.llama import attend, build_sandwich, gated_mlp, read_decoder
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import StoredNames
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId

NORMS = (
    "input_layernorm",
    "post_self_attn_layernorm",
    "post_attention_layernorm",
    "post_mlp_layernorm",
)
_DEFAULTS = {
    "head_dim": 128,
    "num_key_value_heads": 4,
    "num_experts": 384,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 512,
}


class Kolibri1:
    """Kolibri 1: only layers with a window have a RoPE. Source: transformers modeling_kolibri1."""

    stored = StoredNames(
        {
            r"\.moe\.router\.expert_bias": ".mlp.gate.e_score_correction_bias",
            r"\.post_attn_norm\.": ".post_self_attn_layernorm.",
            r"\.post_ffn_norm\.": ".post_mlp_layernorm.",
        }
    )

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Kolibri 1 config; it has no dense MLP."""
        config = {**_DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
        window = read_int(config, "sliding_window", 513)
        windows = read_windows(config, window, default=lambda i: (i + 1) % 5 > 0)
        shared = read_int(config, "shared_expert_intermediate_size", 512, high=1 << 24)
        extra = {
            "windows": windows,
            "no_rope": tuple(i for i, keys in enumerate(windows) if not keys),
            **read_experts(config, count="num_experts", width="moe_intermediate_size"),
            "renormalize": read_bool(config, "norm_topk_prob", False),
        }
        sizes = {**config, "intermediate_size": shared}
        return read_decoder(sizes, positions=262144, extra=extra)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        build_sandwich(b, s, attention=partial(attend, qk_norm=True), norms=NORMS, mlp=_mlp)


def _mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, to: ValueId | None) -> ValueId:
    """Return the layer's experts of h plus the expert that all tokens share."""
    at = f"model.layers.{layer}.mlp"
    total = add_mixture(
        b,
        s,
        at,
        h,
        to,
        parts=("gate_proj", "up_proj", "down_proj"),
        renormalize=cast("bool", s.extra["renormalize"]),
        score="chosen_sigmoid",
        bias=f"{at}.gate.e_score_correction_bias",
    )
    return gated_mlp(b, s, f"{at}.shared_experts", h, s.intermediate, to=total)
