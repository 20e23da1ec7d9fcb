"""Layer norms of the heads of q and k (Persimmon, Command R+ and StableLM 2 12B)."""

from __future__ import annotations

from cpuserve.models.llama import heads_of
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import Joined, ValueId


def norm_heads(
    b: Builder, s: ModelSpec, qkv: ValueId, q: Joined, k: Joined, *, bias: bool = False
) -> None:
    """Apply a layer norm to each head of q and k in qkv, in place.

    q, k: their weights, as in `Builder.part_layer_norm`.
    """
    d = s.head_dim
    b.part_layer_norm(qkv, q, width=d, parts=s.q_heads, bias=bias)
    b.part_layer_norm(qkv, k, width=d, parts=s.kv_heads, column=s.q_heads * d, bias=bias)


def head_norm_attention(
    b: Builder,
    s: ModelSpec,
    layer: int,
    h: ValueId,
    x: ValueId,
    *,
    q: Joined,
    k: Joined,
    paired: bool = False,
) -> None:
    """Add the layer's attention of h to x; each head of q and k has a layer norm (`norm_heads`).

    paired: the RoPE rotates neighbouring dims.
    """
    prefix = f"model.layers.{layer}.self_attn"
    qkv = heads_of(b, s, prefix, h)
    norm_heads(b, s, qkv, q, k)
    if paired and s.rope is not None:
        b.rotate(qkv, heads=s.q_heads + s.kv_heads, rope=s.rope, paired=True)
    b.rope_store_kv(qkv, layer=layer, rope=None if paired else s.rope)
    b.linear(
        b.attention(qkv, layer=layer), f"{prefix}.o_proj", bias=s.out_bias, add_to=x, use="output"
    )
