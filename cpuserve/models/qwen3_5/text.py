"""Qwen3-Next, Qwen3.5, 3.6 and 3.8: gated delta nets, and gated attention in each fourth layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from cpuserve.models.config import (
    read_bool,
    read_choice,
    read_int,
    read_kinds,
)
from cpuserve.models.delta_nets import gated_attention, inputs_of, project_parts, read_delta
from cpuserve.models.experts import qwen_shared_mlp, read_shared_experts
from cpuserve.models.llama import build_decoder, offset_norm, read_decoder
from cpuserve.models.parts import SpecParts
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import StoredNames
from cpuserve.program.builder import Builder
from cpuserve.program.operations.recurrent import DeltaSizes
from cpuserve.program.ops import ValueId
from cpuserve.program.parts import rows

# Computes (inputs, gates) of a gated delta net. Arguments: (builder, sizes, name of the module, h).
Project = Callable[[Builder, DeltaSizes, str, ValueId], tuple[ValueId, ValueId]]

KINDS = ("linear_attention", "full_attention")
STORED = StoredNames(offset_norms=True)


class Qwen3Next:
    """Gated delta nets, attention in every fourth layer, and experts.

    Source: transformers modeling_qwen3_next.
    """

    stored = STORED

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Qwen3-Next config.

        Without layer_types, every full_attention_interval-th layer (default 4) has attention.
        """
        parts = read_shared_experts(config, renormalize=read_bool(config, "norm_topk_prob", True))
        is_split = read_bool(config, "linear_in_proj_split", False)  # only in configs of GGUF files
        return _spec(config, {**parts, "split": is_split})

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        mix = partial(_mix, project=_project_half if s.parts["split"] else _project)
        build_decoder(b, s, attention=mix, mlp=qwen_shared_mlp, norm=offset_norm)


class Qwen35:
    """Qwen3.5, 3.6 and 3.8: layers as in Qwen3-Next with a dense MLP.

    Source: transformers modeling_qwen3_5.
    """

    stored = STORED

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Qwen3.5 text config."""
        return _spec(config, {})

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        mix = partial(_mix, project=project_parts)
        build_decoder(b, s, attention=mix, norm=offset_norm)


class Qwen35Moe:
    """Qwen3.5 with routed experts, and one for all tokens. Source: modeling_qwen3_5_moe."""

    stored = STORED

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Qwen3.5-MoE text config."""
        parts = read_shared_experts(config, renormalize=True)
        width = config.get("moe_intermediate_size")  # no layer has a dense MLP
        config = {**config, "intermediate_size": width}
        return _spec(config, parts)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        mix = partial(_mix, project=project_parts)
        build_decoder(b, s, attention=mix, mlp=qwen_shared_mlp, norm=offset_norm)


def _spec(config: Mapping[str, Any], parts: SpecParts) -> ModelSpec:
    bias = read_bool(config, "attention_bias", False)
    # The convolutions of delta nets have this activation as well, and a kernel only for SiLU.
    read_choice(config, "hidden_act", "silu", {"silu": "silu", "swish": "silu"})
    return read_decoder(
        {
            "partial_rotary_factor": 0.25,
            **{k: v for k, v in config.items() if k != "partial_rotary_factor" or v is not None},
            "head_dim": config.get("head_dim") or 256,
        },
        positions=32768,
        qkv_bias=bias,
        out_bias=bias,
        parts={
            **parts,
            "attends": _attends(config),
            "delta": read_delta(config),
            # Only configs of GGUF files have this key.
            "tiled": read_bool(config, "linear_value_heads_tiled", False),
        },
    )


def _attends(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return for each layer whether it has attention; the other layers have a gated delta net."""

    def default(layer: int) -> str:
        return KINDS[(layer + 1) % read_int(config, "full_attention_interval", 4) == 0]

    kinds = read_kinds(config, "layer_types", KINDS, default)
    return tuple(kind == "full_attention" for kind in kinds)


def _mix(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId, *, project: Project) -> None:
    """Add attention or a gated delta net of h to x; project: computes the inputs of the net."""
    attends = s.parts["attends"]
    if attends[layer]:
        prefix = f"model.layers.{layer}.self_attn"
        a = gated_attention(b, s, prefix, sum(attends[:layer]), h)
        b.linear(a, f"{prefix}.o_proj", bias=s.out_bias, add_to=x, use="output")
    else:
        prefix, sizes = f"model.layers.{layer}.linear_attn", s.parts["delta"]
        inputs, gates = project(b, sizes, prefix, h)
        out = b.gated_delta(inputs, gates, prefix, tiled=s.parts["tiled"], **sizes)
        b.linear(out, f"{prefix}.out_proj", add_to=x)


def _project(b: Builder, sizes: DeltaSizes, prefix: str, h: ValueId) -> tuple[ValueId, ValueId]:
    """Return (inputs, gates) of a delta net, from matrices with their rows grouped by key head."""
    key, count = sizes["key_width"], sizes["key_heads"]
    value = sizes["value_heads"] // count * sizes["value_width"]  # columns of values per key head
    x = _regrouped(b, h, f"{prefix}.in_proj_qkvz", count, (key, key, value, value))
    return x, _gates(b, sizes, prefix, h)


def _project_half(
    b: Builder, sizes: DeltaSizes, prefix: str, h: ValueId
) -> tuple[ValueId, ValueId]:
    """Do the same as `_project`, where only the rows of b and a are grouped by key head."""
    return inputs_of(b, sizes, prefix, h), _gates(b, sizes, prefix, h)


def _gates(b: Builder, sizes: DeltaSizes, prefix: str, h: ValueId) -> ValueId:
    heads_of_key = sizes["value_heads"] // sizes["key_heads"]
    return _regrouped(
        b, h, f"{prefix}.in_proj_ba", sizes["key_heads"], (heads_of_key, heads_of_key)
    )


def _regrouped(b: Builder, h: ValueId, name: str, count: int, widths: tuple[int, ...]) -> ValueId:
    """Return a linear of h; for each of `count` heads its matrix has parts of `widths` rows.

    The result has the first parts of all heads, then the second parts of all heads, and so on.
    """
    parts: dict[str, int] = {}
    for i, width in enumerate(widths):
        for head in range(count):
            parts[rows(name, head * sum(widths) + sum(widths[:i]), width)] = width
    return b.linear(h, list(parts), features=list(parts.values()))
