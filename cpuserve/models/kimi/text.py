"""Kimi Linear: delta nets with a decay for each row of a state, latent attention, and experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cpuserve.models.config import (
    read_bool,
    read_choice,
    read_int,
    read_kinds,
    read_object,
    refuse,
)
from cpuserve.models.deepseek import add_latent, read_latent
from cpuserve.models.experts import add_shared_mixture, read_dense_layers, read_groups
from cpuserve.models.llama import build_decoder, dense_mlp
from cpuserve.models.parts import SpecParts
from cpuserve.models.row_delta import CONVOLUTIONS, KINDS, read_row_delta, row_delta, with_keys
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import StoredNames, experts_by_number
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId


class KimiLinear:
    """Kimi Linear 48B-A3B: three delta nets for each latent attention.

    Source: transformers modeling_kimi_linear.
    """

    stored = StoredNames(
        {
            **experts_by_number("mlp", "block_sparse_moe"),
            r"\.mlp\.(gate|shared_experts)\.": r".block_sparse_moe.\1.",
            # transformers 5.24 saves layers without experts under the name of those with experts.
            r"\.block_sparse_moe\.(gate_proj|up_proj|down_proj)\.": r".mlp.\1.",
            r"\.self_attn\.forget_gate\.": ".self_attn.",
        },
        cut=lambda _: CONVOLUTIONS,
    )

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Kimi Linear config."""
        defaults = {"q_lora_rank": None, "rms_norm_eps": 1e-5, "routed_scaling_factor": 2.446}
        config = {**defaults, **with_keys(config)}
        if not read_bool(config, "mla_use_nope", True):
            refuse("mla_use_nope", False, "true: attention has no RoPE")
        sigmoid = {"sigmoid": "sigmoid"}
        read_choice(config, "moe_router_activation_func", "sigmoid", sigmoid)
        read_choice(config, "hidden_act", "silu", {"silu": "silu", "swish": "silu"})
        kinds = _read_kinds(config)
        spec = read_latent(
            config,
            positions=1048576,
            dense=read_dense_layers(config, first=read_int(config, "first_k_dense_replace", 1)),
            groups=read_groups(config, (1, 1), best=2),
            renormalize=read_bool(config, "norm_topk_prob", True),
            interleaved=False,
            turns=False,
        )
        parts: SpecParts = {
            **spec.parts,
            "attends": tuple(kind == "full_attention" for kind in kinds),
            "row_delta": read_row_delta(config),
        }
        return replace(spec, parts=parts)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        build_decoder(b, s, attention=_mix, mlp=_mlp)


def _read_kinds(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the kind of each layer; linear_attn_config may list layers, counted from 1."""
    full_layers = read_object(config, "linear_attn_config").get("full_attn_layers")
    if full_layers is not None and (
        not isinstance(full_layers, list) or any(type(i) is not int for i in full_layers)
    ):
        refuse("full_attn_layers", full_layers, "a list of layer numbers")

    def default(layer: int) -> str:
        attends = layer > 0 and layer % 4 == 0 if full_layers is None else layer + 1 in full_layers
        return KINDS[attends]

    return read_kinds(config, "layer_types", KINDS, default)


def _mix(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the latent attention or the delta net of h to x, whichever the layer has."""
    attends = s.parts["attends"]
    if attends[layer]:
        add_latent(b, s, layer, h, x)
    else:
        prefix = f"model.layers.{layer}.self_attn"
        heads = s.parts["row_delta"]["heads"]
        out = row_delta(b, s, prefix, h, rates=(1, 1, heads, 1))
        b.linear(out, f"{prefix}.o_proj", add_to=x, use="output")


def _mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's experts of h to x; the first layers have a plain MLP instead."""
    if layer in s.parts["dense_layers"]:
        dense_mlp(b, s, layer, h, x)
        return
    prefix, parts = f"model.layers.{layer}.block_sparse_moe", ("w1", "w3", "w2")
    add_shared_mixture(b, s, prefix, h, x, score="sigmoid", parts=parts)
