"""DiffLlama: Llama with differential attention, the difference of two softmaxes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cpuserve.models.config import read_bool, refuse
from cpuserve.models.llama import build_decoder, read_decoder
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId
from cpuserve.program.parts import rows
from cpuserve.program.program import Use


class DiffLlama:
    """DiffLlama. Source: transformers modeling_diffllama, and Ye et al., arXiv 2410.05258.

    ModelSpec.head_dim is the width of a head in the KV cache, where values of two heads are one.
    Queries and keys are half as wide, and zeros follow them.
    """

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a DiffLlama config."""
        bias = read_bool(config, "attention_bias", False)
        spec = read_decoder(
            {"rms_norm_eps": 1e-5, **config}, positions=2048, qkv_bias=bias, out_bias=bias
        )
        if spec.kv_heads % 2:
            refuse("num_key_value_heads", spec.kv_heads, "even: values of two heads are one")
        return replace(spec, head_dim=2 * spec.head_dim, attention_scale=spec.head_dim**-0.5)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        build_decoder(b, s, attention=_attention)


def _attention(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's attention of h to x: the second half of the heads is subtracted."""
    at, first = f"model.layers.{layer}.self_attn", 0.8 - 0.6 * math.exp(-0.3 * layer)
    a = b.attention(_stored(b, s, layer, at, h), layer=layer, scale=s.attention_scale)
    half = s.q_heads // 2 * s.head_dim
    out, less = b.columns(a, half), b.columns(a, half, column=half)
    b.scale_by_lambda(less, at, width=s.head_dim // 2, plus=first, negative=True)
    b.add(less, to=out)
    b.part_norm(out, None, width=s.head_dim, parts=s.q_heads // 2)
    b.multiply_by(out, 1 - first)
    b.linear(out, f"{at}.o_proj", bias=s.out_bias, add_to=x, use="output")


def _stored(b: Builder, s: ModelSpec, layer: int, at: str, h: ValueId) -> ValueId:
    """Return the queries, keys and values of h, and store keys and values in the KV cache.

    A value joins a head of the first half of the heads and one of the second half.
    Keys of both halves have the same values.
    """
    d, half, count = s.head_dim // 2, s.kv_heads // 2, s.q_heads + s.kv_heads
    names = {f"{at}.q_proj": s.q_heads * d, f"{at}.k_proj": s.kv_heads * d}
    uses: list[Use] = ["linear", "linear"]
    for head in range(half):
        names |= {rows(f"{at}.v_proj", i * d, d): d for i in (head, half + head)}
        uses += ["values", "values"]
    qkv = b.linear(h, list(names), features=list(names.values()), bias=s.qkv_bias, use=uses)
    values = b.columns(qkv, s.kv_heads * d, column=count * d)
    qk = b.resize_heads(b.columns(qkv, count * d), heads=count, begin=0, to=2 * d)
    one = b.columns(qk, 2 * count * d, more=values)
    both = b.columns(one, (2 * count + s.kv_heads) * d, more=values)
    b.rope_store_kv(both, layer=layer, rope=s.rope)
    return both
