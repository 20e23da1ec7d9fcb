"""Gated delta nets: their sizes, the matrices before them, and the gated attention beside them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from cpuserve.models.config import read_int, read_taps, refuse
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.operations.recurrent import DeltaSizes
from cpuserve.program.ops import ValueId


def read_delta(
    config: Mapping[str, Any],
    *,
    key_heads: int = 16,
    value_heads: int = 32,
    key_width: int = 128,
    value_width: int = 128,
) -> DeltaSizes:
    """Return the sizes of the gated delta nets in a config; the arguments are defaults."""
    size = partial(read_int, config, high=65536)
    keys = size("linear_num_key_heads", key_heads)
    values = size("linear_num_value_heads", value_heads)
    if values % keys:
        refuse("linear_num_value_heads", values, f"a multiple of linear_num_key_heads ({keys})")
    return {
        "key_heads": keys,
        "value_heads": values,
        "key_width": size("linear_key_head_dim", key_width),
        "value_width": size("linear_value_head_dim", value_width),
        "taps": read_taps(config, "linear_conv_kernel_dim", 4),
    }


def gated_attention(
    b: Builder,
    s: ModelSpec,
    prefix: str,
    layer: int,
    h: ValueId,
    *,
    selection: ValueId | None = None,
) -> ValueId:
    """Return attention of h, multiplied by the sigmoid of gates, before the output matrix.

    layer: the number of this layer among those with a KV cache. selection: as in `attention`.
    """
    d = s.head_dim
    features = [2 * s.q_heads * d, s.kv_heads * d, s.kv_heads * d]
    qkv = b.linear(
        h, [f"{prefix}.{n}_proj" for n in "qkv"], features=features, bias=s.qkv_bias, use="qkv"
    )
    qkv = b.split_gates(qkv)
    b.rope_store_kv(
        qkv,
        layer=layer,
        rope=s.rope,
        q_norm=f"{prefix}.q_norm",
        k_norm=f"{prefix}.k_norm",
        plus_one=True,
    )
    a = b.attention(qkv, layer=layer, selection=selection)
    b.gate(qkv, to=a)
    return a


def project_parts(
    b: Builder, sizes: DeltaSizes, prefix: str, h: ValueId
) -> tuple[ValueId, ValueId]:
    """Return (inputs, gates) of a delta net: q, k and v are one matrix, z, b and a are three."""
    gates, heads = [f"{prefix}.in_proj_{n}" for n in "ba"], sizes["value_heads"]
    return inputs_of(b, sizes, prefix, h), b.linear(h, gates, features=[heads, heads])


def inputs_of(b: Builder, sizes: DeltaSizes, prefix: str, h: ValueId) -> ValueId:
    """Return the columns q, k, v and z of a delta net, where q, k and v are one matrix."""
    values = sizes["value_heads"] * sizes["value_width"]
    channels = 2 * sizes["key_heads"] * sizes["key_width"] + values
    parts = [f"{prefix}.in_proj_{n}" for n in ("qkv", "z")]
    return b.linear(h, parts, features=[channels, values])
