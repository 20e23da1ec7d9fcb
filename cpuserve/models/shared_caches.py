"""Layers that read the KV caches of earlier layers.

Keys of ModelSpec.parts; ModelSpec.kv_heads and head_dim are for layers without a window:

local_heads: KV heads and head_dim of layers with a window.
caches: the layer with the KV cache that each layer reads.
one_kv: whether layers without a window have no v_proj; their values come from k_proj.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cpuserve.models.config import read_bool, read_int, refuse
from cpuserve.models.gemma import embed_scale
from cpuserve.models.llama import layer_rope, layer_window, read_decoder
from cpuserve.models.parts import SpecParts
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId


def first_shared(config: Mapping[str, Any]) -> int:
    """Return the number of the first layer that reads the KV cache of an earlier layer."""
    layers = read_int(config, "num_hidden_layers", high=4096)
    return layers - read_int(config, "num_kv_shared_layers", 0, low=0, high=layers - 1)


def read_caches(config: Mapping[str, Any], windows: tuple[int, ...]) -> tuple[int, ...]:
    """Return for each layer the number of the layer with the KV cache that it reads.

    A layer reads its own cache, but the last num_kv_shared_layers layers read the cache
    of the last layer before them with the same window.
    """
    first_sharing = first_shared(config)
    last_by_window = {window: layer for layer, window in enumerate(windows[:first_sharing])}
    if missing_windows := {*windows} - {*last_by_window}:
        kind = "a window" if missing_windows.pop() else "full attention"
        sharing_count = config.get("num_kv_shared_layers")
        refuse("num_kv_shared_layers", sharing_count, f"fewer: no layer before them has {kind}")
    return (*range(first_sharing), *(last_by_window[window] for window in windows[first_sharing:]))


def read_shared_decoder(config: Mapping[str, Any], parts: SpecParts, positions: int) -> ModelSpec:
    """Return the hyperparameters of a Gemma whose later layers read the caches of earlier ones.

    config: it has the RoPE and the heads of layers without a window.
    parts: with the width of the MLP of each layer. positions: as in `read_decoder`.
    """
    bias, tied = read_bool(config, "attention_bias", False), config.get("tie_word_embeddings")
    spec = read_decoder(
        {
            **config,
            "intermediate_size": max(parts["mlp_widths"]),
            "hidden_act": config.get("hidden_activation") or "gelu_pytorch_tanh",
            "tie_word_embeddings": True if tied is None else tied,
        },
        positions=positions,
        qkv_bias=bias,
        out_bias=bias,
        parts=parts,
    )
    scale = embed_scale(spec.width, spec.dtype)
    return replace(spec, embed_scale=scale, attention_scale=1.0)


def shared_attention(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add norm(the layer's attention of h) to x."""
    prefix, window = f"model.layers.{layer}", layer_window(s, layer)
    kv_heads, d = s.kv_heads, s.head_dim
    if window:
        kv_heads, d = s.parts["local_heads"]
    q, k, v, o = (f"{prefix}.self_attn.{part}_proj" for part in "qkvo")
    cache = s.parts["caches"][layer]
    has_cache = cache == layer and not s.guesses
    names, sizes = [q], [s.q_heads * d]
    if has_cache:
        # With one_kv, values of global layers are the keys before their norm: k is used twice.
        names += [k, k if s.parts["one_kv"] and not window else v]
        sizes += [kv_heads * d] * 2
    else:
        b.leave(f"{prefix}.self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm"))
    qkv = b.linear(h, names, features=sizes, bias=s.qkv_bias, use="qkv" if v in names else "linear")
    if has_cache:
        b.part_norm(qkv, None, width=d, column=(s.q_heads + kv_heads) * d, parts=kv_heads)
    b.rope_store_kv(
        qkv,
        layer=cache,
        rope=layer_rope(s, layer),
        q_norm=f"{prefix}.self_attn.q_norm",
        k_norm=f"{prefix}.self_attn.k_norm" if has_cache else None,
        heads=(kv_heads, d),
        stores=has_cache,
    )
    a = b.attention(qkv, layer=cache, window=window, scale=s.attention_scale)
    out = b.linear(a, o, features=s.width, bias=s.out_bias, use="output")
    b.add(b.rms_norm(out, f"{prefix}.post_attention_layernorm"), to=x)
