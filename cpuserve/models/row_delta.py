"""Delta nets with a decay for each row of a state, and the keys of configs with such layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.models.config import read_int, read_object, read_taps
from cpuserve.models.parts import RowDelta
from cpuserve.models.spec import ModelSpec
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


def with_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with the keys of DeepSeek; ModelError for a wrong or missing number."""
    renamed = {theirs: config[k] for k, theirs in _KEYS.items() if config.get(k) is not None}
    merged_config = {**config, **renamed}
    for key in ("num_experts", "num_experts_per_token", "num_shared_experts"):
        if key in config or _KEYS[key] not in merged_config:
            read_int(config, key, high=4096)
    return merged_config


def read_row_delta(config: Mapping[str, Any]) -> RowDelta:
    """Return the sizes of the delta nets, from linear_attn_config or from keys of their own."""
    nested = read_object(config, "linear_attn_config")
    names = {"num_heads": "linear_num_heads", "head_dim": "linear_head_dim"}
    names["short_conv_kernel_size"] = "linear_conv_kernel_dim"
    nested_sizes = {key: nested[k] for k, key in names.items() if nested.get(k) is not None}
    sizes = {**config, **nested_sizes}
    return {
        "heads": read_int(sizes, "linear_num_heads", 32, high=65536),
        "width": read_int(sizes, "linear_head_dim", 128, high=65536),
        "taps": read_taps(sizes, "linear_conv_kernel_dim", 4),
    }


def row_delta(
    b: Builder, s: ModelSpec, prefix: str, h: ValueId, *, rates: tuple[int, ...], bound: float = 0.0
) -> ValueId:
    """Return the delta net `prefix` of h. Two small matrices make the gates, and two the decays.

    rates: the shape of A_log.
    bound: the lower bound of the logarithms of decays, as in `GatedDelta`.
    """
    sizes = s.parts["row_delta"]
    heads, width = sizes["heads"], sizes["width"]
    qkv_width = heads * width
    qkv = b.linear(h, [f"{prefix}.{n}_proj" for n in "qkv"], features=[qkv_width] * 3, use="qkv")
    low = [b.linear(h, f"{prefix}.{n}_a_proj", features=width) for n in "gf"]
    z, decays = (
        b.linear(y, f"{prefix}.{n}_b_proj", features=qkv_width)
        for n, y in zip("gf", low, strict=True)
    )
    betas = b.linear(h, f"{prefix}.b_proj", features=heads)
    qkvz, gates = b.columns(qkv, 3 * qkv_width, more=z), b.columns(betas, heads, more=decays)
    return gated_rows(b, s, prefix, qkvz, gates, bound=bound, rates=rates)


def gated_rows(
    b: Builder,
    s: ModelSpec,
    prefix: str,
    qkvz: ValueId,
    gates: ValueId,
    *,
    bound: float,
    rates: tuple[int, ...] = (),
) -> ValueId:
    """Return the delta net `prefix` over the columns q, k, v and z, with one decay for each row.

    gates: the columns of the betas and of the decays. bound, rates: as in `row_delta`.
    """
    sizes = s.parts["row_delta"]
    heads, width = sizes["heads"], sizes["width"]
    return b.gated_delta(
        qkvz,
        gates,
        prefix,
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
