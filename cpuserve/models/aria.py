"""Aria (text): Llama with chosen and shared experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.models.config import read_bool, read_int
from cpuserve.models.experts import add_mixture, read_experts
from cpuserve.models.llama import build_decoder, gated_mlp, read_decoder
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import StoredNames
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId


class AriaText:
    """The text part of Aria. Source: transformers modeling_aria."""

    stored = StoredNames(
        published={
            r"\.mlp\.experts\.fc1\.weight": ".mlp.experts.gate_up_proj",
            r"\.mlp\.experts\.fc2\.weight": ".mlp.experts.down_proj",
        }
    )

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in an Aria text config."""
        bias = read_bool(config, "attention_bias", False)
        counted = {
            "moe_num_experts": read_int(config, "moe_num_experts", 8, high=4096),
            "num_experts_per_tok": read_int(config, "moe_topk", 2),
            "intermediate_size": config.get("intermediate_size"),
        }
        parts = read_experts(counted, count="moe_num_experts", width="intermediate_size")
        parts["shared"] = read_int(config, "moe_num_shared_experts", 2)
        return read_decoder(
            config,
            positions=2048,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=read_bool(config, "mlp_bias", False),
            parts=parts,
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        build_decoder(b, s, mlp=_mlp)


def _mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the chosen and the shared experts of h to x."""
    at, parts = f"model.layers.{layer}.mlp", ("gate_proj", "up_proj", "down_proj")
    add_mixture(
        b, s, at, h, x, parts=parts, router="router", renormalize=False, score="chosen_softmax"
    )
    shared = s.parts["shared"] * s.intermediate
    gated_mlp(b, s, f"{at}.shared_experts", h, shared, to=x)
