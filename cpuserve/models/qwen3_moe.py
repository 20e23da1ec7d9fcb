"""Qwen3-MoE: Qwen3 with mixtures of experts as feed-forward layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from cpuserve.models.config import read_bool, read_int, read_qwen_windows
from cpuserve.models.experts import add_mixture, read_experts, read_sparse_step
from cpuserve.models.llama import (
    build_decoder,
    dense_mlp,
    gated_mlp,
    qk_norm_attention,
    read_decoder,
)
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId


class Qwen3Moe:
    """Qwen3 with experts chosen by a softmax. Source: transformers modeling_qwen3_moe."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Qwen3-MoE config."""
        bias = read_bool(config, "attention_bias", False)
        layers = read_int(config, "num_hidden_layers", high=4096)
        more = read_qwen_windows(config)
        extra = {
            **more.pop("extra", {}),
            **read_experts(config, count="num_experts", width="moe_intermediate_size"),
            "renormalize": read_bool(config, "norm_topk_prob", False),
            "dense_layers": read_sparse_step(config, layers),
        }
        return read_decoder(
            config,
            positions=32768,
            qkv_bias=bias,
            out_bias=bias,
            extra=extra,
            **more,
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        build_decoder(b, s, attention=qk_norm_attention, mlp=qwen_mlp)


def read_shared_experts(config: Mapping[str, Any], *, renormalize: bool) -> dict[str, object]:
    """Return the entries of `ModelSpec.extra` that `qwen_shared_mlp` needs."""
    layers = read_int(config, "num_hidden_layers", high=4096)
    return {
        **read_experts(config, count="num_experts", width="moe_intermediate_size"),
        "renormalize": renormalize,
        "dense_layers": read_sparse_step(config, layers),
        "shared_width": read_int(config, "shared_expert_intermediate_size", high=1 << 24),
    }


def qwen_mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the mixture of experts of h to x, or the dense MLP of h, whichever the layer has.

    The layers in s.extra["dense_layers"] have a dense MLP.
    """
    if layer in cast("tuple[int, ...]", s.extra["dense_layers"]):
        dense_mlp(b, s, layer, h, x)
        return
    add_mixture(
        b,
        s,
        f"model.layers.{layer}.mlp",
        h,
        x,
        parts=("gate_proj", "up_proj", "down_proj"),
        renormalize=cast("bool", s.extra["renormalize"]),
    )


def qwen_shared_mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Do the same as `qwen_mlp`, and add an expert for all tokens, times the sigmoid of a gate."""
    qwen_mlp(b, s, layer, h, x)
    if layer in cast("tuple[int, ...]", s.extra["dense_layers"]):
        return
    add_shared_expert(b, s, f"model.layers.{layer}.mlp", h, x)


def add_shared_expert(b: Builder, s: ModelSpec, at: str, h: ValueId, x: ValueId) -> None:
    """Add to x the expert of h that all tokens share, times the sigmoid of a gate."""
    out = gated_mlp(b, s, f"{at}.shared_expert", h, cast("int", s.extra["shared_width"]))
    b.gate(b.linear(h, f"{at}.shared_expert_gate", features=1), to=out)
    b.add(out, to=x)
