"""OLMo 1 to 3, OLMoE and FlexOlmo; all but OLMo 1 have RMS norms of all q heads as one row."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from cpuserve.models.config import read_bool, read_heads, read_int, read_windows, refuse
from cpuserve.models.experts import add_mixture, qwen_mlp, read_experts
from cpuserve.models.llama import (
    attend,
    build_decoder,
    build_sandwich,
    read_clip,
    read_decoder,
    self_attention,
)
from cpuserve.models.parts import SpecParts
from cpuserve.models.rope import split_ropes
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId

NORMS = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
THETA3 = 500000.0  # RoPE base of OLMo 3 if the config has none


class Olmo:
    """OLMo 1: Llama with layer norms that have no weights. Source: transformers modeling_olmo."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in an OLMo 1 config; the epsilon of norms is fixed."""
        return _spec({**config, "rms_norm_eps": 1e-5}, 2048, {"clip": read_clip(config)})

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        build_decoder(b, s, norm=partial(_plain_norm))


def _plain_norm(b: Builder, x: ValueId, name: str) -> ValueId:
    """Return the layer norm of x, without a weight and a bias."""
    return b.layer_norm(x, name, bias=False, weightless=True)


class Olmo2:
    """OLMo 2: norms after attention and MLP, none before. Source: modeling_olmo2."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in an OLMo 2 config."""
        return _spec(config, 2048, {})

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        build_sandwich(b, s, attention=partial(attend, wide_norm=True), norms=NORMS)


class Olmo3:
    """OLMo 2 with a window and an unscaled RoPE in three of four layers.

    Source: transformers modeling_olmo3.
    """

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in an OLMo 3 config."""
        if config.get("sliding_window", 1) is None:
            refuse("sliding_window", None, "the number of keys that layers with a window see")
        window = read_int(config, "sliding_window", 4096, low=0)
        windows = read_windows(config, window, default=lambda i: (i + 1) % 4 > 0)
        _, _, head_dim = read_heads(config, read_int(config, "hidden_size", high=1 << 20))
        local_theta = config.get("rope_theta") or THETA3
        config, local_rope = split_ropes(
            config, head_dim, 2048, theta=THETA3, local_theta=local_theta
        )
        parts: SpecParts = {"windows": windows, "local_rope": local_rope}
        return _spec(config, 2048, parts)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        Olmo2.build(b, s)


class Olmoe:
    """OLMoE: norms before attention and experts, which a softmax chooses.

    Source: transformers modeling_olmoe.
    """

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in an OLMoE config."""
        return _spec(config, 4096, {**_experts(config), "clip": read_clip(config)})

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        build_decoder(b, s, attention=partial(self_attention, wide_norm=True), mlp=qwen_mlp)


class FlexOlmo:
    """FlexOlmo: OLMo 2 with the experts of OLMoE. Source: transformers modeling_flex_olmo."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a FlexOlmo config."""
        chosen = read_int(config, "num_experts_per_tok", 5)
        config = {"num_experts": 7, **config, "num_experts_per_tok": chosen}
        return _spec({"rope_theta": THETA3, "rms_norm_eps": 1e-6, **config}, 4096, _experts(config))

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        attention = partial(attend, wide_norm=True)
        build_sandwich(b, s, attention=attention, norms=NORMS, mlp=_mixture)


def _mixture(b: Builder, s: ModelSpec, layer: int, h: ValueId, to: ValueId | None) -> ValueId:
    """Return the layer's experts of h."""
    at, parts = f"model.layers.{layer}.mlp", ("gate_proj", "up_proj", "down_proj")
    renormalize = s.parts["renormalize"]
    return add_mixture(b, s, at, h, to, parts=parts, renormalize=renormalize)


def _experts(config: Mapping[str, Any]) -> SpecParts:
    return {
        **read_experts(config, count="num_experts", width="intermediate_size"),
        "renormalize": read_bool(config, "norm_topk_prob", False),
        "dense_layers": (),
    }


def _spec(config: Mapping[str, Any], positions: int, parts: SpecParts) -> ModelSpec:
    bias = read_bool(config, "attention_bias", False)
    return read_decoder(
        {"rms_norm_eps": 1e-5, **config},
        positions=positions,
        qkv_bias=bias,
        out_bias=bias,
        parts=parts,
    )
