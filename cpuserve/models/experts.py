"""Mixtures of experts: settings and feed-forward parts that several families share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cpuserve.models.config import read_float, read_int, read_kinds, refuse
from cpuserve.models.llama import before_silu, dense_mlp, gated_mlp
from cpuserve.models.parts import SpecParts
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.operations.mixture import Groups
from cpuserve.program.ops import RouterScore, Then, ValueId

GATED_PARTS = ("gate_proj", "up_proj", "down_proj")


def read_experts(config: Mapping[str, Any], *, count: str, width: str) -> SpecParts:
    """Return the entries of `ModelSpec.parts` that `add_mixture` needs.

    count, width: the keys of the config for the number of experts and for their width.
      transformers 5 saves the number of experts of every family under the key of Mixtral.
    """
    count = count if config.get("num_local_experts") is None else "num_local_experts"
    experts = read_int(config, count, high=4096)
    top_k = read_int(config, "num_experts_per_tok")
    if top_k > experts:
        refuse("num_experts_per_tok", top_k, f"at most {count}, {experts}")
    return {
        "experts": experts,
        "chosen": top_k,
        "expert_width": read_int(config, width, high=1 << 24),
    }


def read_dense_layers(
    config: Mapping[str, Any], *, first: int = 0, interval: int = 1
) -> tuple[int, ...]:
    """Return the layers without experts, by mlp_layer_types.

    first, interval: without that key, the `first` layers are without experts, and every layer
      that is no multiple of `interval`.
    """
    mlp_types = ("dense", "sparse")
    kinds = read_kinds(
        config, "mlp_layer_types", mlp_types, lambda i: mlp_types[i >= first and i % interval == 0]
    )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")


def read_first_dense(config: Mapping[str, Any], default: int) -> tuple[int, ...]:
    """Return the layers without experts: the layers before first_k_dense_replace."""
    layers = read_int(config, "num_hidden_layers", high=4096)
    return tuple(range(min(layers, read_int(config, "first_k_dense_replace", default, low=0))))


def read_limits(config: Mapping[str, Any], key: str, layers: int) -> tuple[float, ...]:
    """Return the limit of the gates and ups of each layer; 0, null or no list: there is none."""
    limits = config.get(key) or [0.0] * layers
    if not isinstance(limits, list) or len(limits) < layers:
        refuse(key, limits, f"{layers} numbers")
    return tuple(read_float({key: n}, key) if n else 0.0 for n in limits[:layers])


def read_groups(config: Mapping[str, Any], default: tuple[int, int], *, best: int) -> Groups | None:
    """Return the groups of experts of a router; None if tokens use experts of all groups.

    default: the values of n_group and topk_group if they are missing.
    best: the score of a group is the sum of this many of its highest scores.
    """
    count = read_int(config, "n_group", default[0])
    kept_groups = read_int(config, "topk_group", default[1])
    return Groups(count, kept_groups, best) if kept_groups != count else None


def read_sparse_step(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Return the layers without experts: in mlp_only_layers, or skipped by a sparse step.

    A layer is skipped if its number, counted from 1, is not a multiple of decoder_sparse_step.
    """
    step = read_int(config, "decoder_sparse_step", 1)
    dense_layers = config.get("mlp_only_layers") or []
    if not isinstance(dense_layers, list) or not all(type(i) is int for i in dense_layers):
        refuse("mlp_only_layers", dense_layers, "a list of layer numbers")
    return tuple(i for i in range(layers) if i in dense_layers or (i + 1) % step)


def add_mixture(
    b: Builder,
    s: ModelSpec,
    prefix: str,
    h: ValueId,
    x: ValueId | None,
    *,
    parts: Sequence[str] = GATED_PARTS,
    renormalize: bool,
    score: RouterScore = "softmax",
    scale: float = 1.0,
    bias: str | None = None,
    groups: Groups | None = None,
    router: str = "gate",
    then: Then | None = None,
    biased: bool = False,
    near: float = 0.0,
    identities: int = 0,
    weigh_inputs: bool = False,
    silu_limit: float = 0.0,
) -> ValueId:
    """Return x plus the mixture of experts of h; if x is None, only the mixture.

    prefix: the name of the module with the experts.
    parts: the suffixes of the gate, up and down matrices.
    router, score, scale, bias, groups: the name of the router and its settings (`Builder.mixture`).
    then: the activation, if it is not the gated activation of the config.
    biased: whether the router and all matrices of experts have biases.
    near: for the score "near_softmax", see `Route`.
    identities, weigh_inputs: see `Builder.mixture`.
    silu_limit: as in `gated_mlp`.

    If there is parts["expert_limit"] or parts["gate_limit"], it limits gates and ups.
    """
    experts = range(s.parts["experts"])
    limit = s.parts.get("expert_limit", s.parts.get("gate_limit", 0.0))
    return b.mixture(
        h,
        f"{prefix}.{router}",
        [[f"{prefix}.experts.{e}.{part}" for part in parts] for e in experts],
        features=s.parts["expert_width"],
        chosen=s.parts["chosen"],
        to=x,
        then=then or s.gated_activation,
        score=score,
        renormalize=renormalize,
        scale=scale,
        bias=bias,
        groups=groups,
        biased=biased,
        near=near,
        identities=identities,
        weigh_inputs=weigh_inputs,
        limit=silu_limit or limit,
        gate_limit=before_silu(silu_limit),
    )


def add_shared_mixture(
    b: Builder,
    s: ModelSpec,
    prefix: str,
    h: ValueId,
    x: ValueId | None,
    *,
    score: RouterScore,
    parts: Sequence[str] = GATED_PARTS,
    bias: str | None = "gate.e_score_correction_bias",
    silu_limits: tuple[float, float] = (0.0, 0.0),
) -> ValueId:
    """Return x plus the chosen experts of h plus the shared experts (one wide expert).

    If x is None, returns the experts alone.
    The router works as in DeepSeek; its settings are in ModelSpec.parts.

    parts: as in add_mixture.
    bias: the suffix of the biases that a sigmoid router adds to choose; None = it has none.
    silu_limits: of chosen and of shared experts, as in `gated_mlp`.
    """
    out = add_mixture(
        b,
        s,
        prefix,
        h,
        x,
        parts=parts,
        renormalize=s.parts["renormalize"],
        score=score,
        scale=s.parts["expert_scale"],
        bias=f"{prefix}.{bias}" if bias is not None and score == "sigmoid" else None,
        groups=s.parts["groups"],
        silu_limit=silu_limits[0],
    )
    shared_width = s.parts["shared"] * s.parts["expert_width"]
    if not shared_width:
        return out
    return gated_mlp(
        b, s, f"{prefix}.shared_experts", h, shared_width, to=out, silu_limit=silu_limits[1]
    )


def sigmoid_mixture(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's experts of h to x, chosen by sigmoids; the first layers have a plain MLP."""
    if layer in s.parts["dense_layers"]:
        dense_mlp(b, s, layer, h, x)
    else:
        add_shared_mixture(b, s, f"model.layers.{layer}.mlp", h, x, score="sigmoid")


def read_shared_experts(config: Mapping[str, Any], *, renormalize: bool) -> SpecParts:
    """Return the entries of `ModelSpec.parts` that `qwen_shared_mlp` needs."""
    layers = read_int(config, "num_hidden_layers", high=4096)
    return {
        **read_experts(config, count="num_experts", width="moe_intermediate_size"),
        "renormalize": renormalize,
        "dense_layers": read_sparse_step(config, layers),
        "shared_width": read_int(config, "shared_expert_intermediate_size", high=1 << 24),
    }


def qwen_mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the mixture of experts of h to x, or the dense MLP of h, whichever the layer has.

    The layers in s.parts["dense_layers"] have a dense MLP.
    """
    if layer in s.parts["dense_layers"]:
        dense_mlp(b, s, layer, h, x)
        return
    add_mixture(
        b,
        s,
        f"model.layers.{layer}.mlp",
        h,
        x,
        renormalize=s.parts["renormalize"],
    )


def qwen_shared_mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Do the same as `qwen_mlp`, and add an expert for all tokens, times the sigmoid of a gate."""
    qwen_mlp(b, s, layer, h, x)
    if layer in s.parts["dense_layers"]:
        return
    add_shared_expert(b, s, f"model.layers.{layer}.mlp", h, x)


def add_shared_expert(b: Builder, s: ModelSpec, prefix: str, h: ValueId, x: ValueId) -> None:
    """Add to x the expert of h that all tokens share, times the sigmoid of a gate."""
    out = gated_mlp(b, s, f"{prefix}.shared_expert", h, s.parts["shared_width"])
    b.gate(b.linear(h, f"{prefix}.shared_expert_gate", features=1), to=out)
    b.add(out, to=x)
