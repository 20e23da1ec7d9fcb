"""BitNet b1.58: norms inside attention and MLP, and squares of ReLUs as gates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from cpuserve.models.config import read_bool, read_choice
from cpuserve.models.llama import attend, build_decoder, read_decoder
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import Then, ValueId


class BitNet:
    """BitNet b1.58 2B-4T; the first BitNets have gates of SiLU. Source: modeling_bitnet."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a BitNet config."""
        known = {"relu2": "relu2", "silu": "silu"}
        extra: dict[str, object] = {"gate": read_choice(config, "hidden_act", "relu2", known)}
        bias = read_bool(config, "attention_bias", False)
        return read_decoder(
            {"rms_norm_eps": 1e-5, "rope_theta": 5e5, **config, "hidden_act": "silu"},
            positions=2048,
            qkv_bias=bias,
            out_bias=bias,
            extra=extra,
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        build_decoder(b, s, attention=_attention, mlp=_mlp)


def _attention(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's attention of h to x."""
    at = f"model.layers.{layer}.self_attn"
    a = b.rms_norm(attend(b, s, layer, h), f"{at}.attn_sub_norm")
    b.linear(a, f"{at}.o_proj", bias=s.out_bias, add_to=x)


def _mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's MLP of h to x."""
    at = f"model.layers.{layer}.mlp"
    then = cast("Then", s.extra["gate"])
    g = b.linear(h, f"{at}.gate_proj", features=s.intermediate, then=then)
    b.multiply(b.linear(h, f"{at}.up_proj", features=s.intermediate), to=g)
    b.linear(b.rms_norm(g, f"{at}.ffn_sub_norm"), f"{at}.down_proj", add_to=x)
