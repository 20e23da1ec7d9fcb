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
    read_taps,
    refuse,
)
from cpuserve.models.deepseek import add_latent, read_latent
from cpuserve.models.experts import add_shared_mixture, read_dense_layers, read_groups
from cpuserve.models.llama import build_decoder, dense_mlp
from cpuserve.models.parts import RowDelta, SpecParts
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import StoredNames, experts_by_number
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId

KINDS = ("linear_attention", "full_attention")
# Keys of the config, each with the key that DeepSeek has for the same value.
_KEYS = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}


# The convolutions of delta nets, which are one in transformers' modules.
CONVOLUTIONS = {".self_attn.conv1d": {f".self_attn.{n}_conv1d": 1 for n in "qkv"}}


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


def with_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with the keys of DeepSeek; ModelError for a wrong or missing number."""
    given = {theirs: config[k] for k, theirs in _KEYS.items() if config.get(k) is not None}
    both = {**config, **given}
    for key in ("num_experts", "num_experts_per_token", "num_shared_experts"):
        if key in config or _KEYS[key] not in both:
            read_int(config, key, high=4096)
    return both


def _read_kinds(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the kind of each layer; linear_attn_config may list layers, counted from 1."""
    listed = read_object(config, "linear_attn_config").get("full_attn_layers")
    if listed is not None and (
        not isinstance(listed, list) or any(type(i) is not int for i in listed)
    ):
        refuse("full_attn_layers", listed, "a list of layer numbers")

    def default(layer: int) -> str:
        attends = layer > 0 and layer % 4 == 0 if listed is None else layer + 1 in listed
        return KINDS[attends]

    return read_kinds(config, "layer_types", KINDS, default)


def read_row_delta(config: Mapping[str, Any]) -> RowDelta:
    """Return the sizes of the delta nets, from linear_attn_config or from keys of their own."""
    nested = read_object(config, "linear_attn_config")
    names = {"num_heads": "linear_num_heads", "head_dim": "linear_head_dim"}
    names["short_conv_kernel_size"] = "linear_conv_kernel_dim"
    own = {ours: nested[k] for k, ours in names.items() if nested.get(k) is not None}
    sizes = {**config, **own}
    return {
        "heads": read_int(sizes, "linear_num_heads", 32, high=65536),
        "width": read_int(sizes, "linear_head_dim", 128, high=65536),
        "taps": read_taps(sizes, "linear_conv_kernel_dim", 4),
    }


def _mix(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the latent attention or the delta net of h to x, whichever the layer has."""
    attends = s.parts["attends"]
    if attends[layer]:
        add_latent(b, s, layer, h, x)
    else:
        at = f"model.layers.{layer}.self_attn"
        heads = s.parts["row_delta"]["heads"]
        out = row_delta(b, s, at, h, rates=(1, 1, heads, 1))
        b.linear(out, f"{at}.o_proj", add_to=x, use="output")


def row_delta(
    b: Builder, s: ModelSpec, at: str, h: ValueId, *, rates: tuple[int, ...], bound: float = 0.0
) -> ValueId:
    """Return the delta net `at` of h. Two small matrices make the gates, and two make the decays.

    rates: the shape of A_log.
    bound: the lower bound of the logarithms of decays, as in `GatedDelta`.
    """
    sizes = s.parts["row_delta"]
    heads, width = sizes["heads"], sizes["width"]
    wide = heads * width
    qkv = b.linear(h, [f"{at}.{n}_proj" for n in "qkv"], features=[wide] * 3, use="qkv")
    low = [b.linear(h, f"{at}.{n}_a_proj", features=width) for n in "gf"]
    z, decays = (
        b.linear(y, f"{at}.{n}_b_proj", features=wide) for n, y in zip("gf", low, strict=True)
    )
    betas = b.linear(h, f"{at}.b_proj", features=heads)
    qkvz, gates = b.columns(qkv, 3 * wide, more=z), b.columns(betas, heads, more=decays)
    return gated_rows(b, s, at, qkvz, gates, bound=bound, rates=rates)


def gated_rows(
    b: Builder,
    s: ModelSpec,
    at: str,
    qkvz: ValueId,
    gates: ValueId,
    *,
    bound: float,
    rates: tuple[int, ...] = (),
) -> ValueId:
    """Return the delta net `at` over the columns q, k, v and z, with one decay for each row.

    gates: the columns of the betas and of the decays. bound, rates: as in `row_delta`.
    """
    sizes = s.parts["row_delta"]
    heads, width = sizes["heads"], sizes["width"]
    return b.gated_delta(
        qkvz,
        gates,
        at,
        key_heads=heads,
        value_heads=heads,
        key_width=width,
        value_width=width,
        taps=sizes["taps"],
        split_conv=True,
        norm="o_norm",
        by_row=True,
        sigmoid=True,
        bound=bound,
        rates=rates,
    )


def _mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's experts of h to x; the first layers have a plain MLP instead."""
    if layer in s.parts["dense_layers"]:
        dense_mlp(b, s, layer, h, x)
        return
    at, parts = f"model.layers.{layer}.block_sparse_moe", ("w1", "w3", "w2")
    add_shared_mixture(b, s, at, h, x, score="sigmoid", parts=parts)
