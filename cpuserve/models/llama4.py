"""Llama 4: experts with weighed inputs, and layers that see only a section of the text."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import msgspec

from cpuserve.models.config import (
    read_bool,
    read_flags,
    read_float,
    read_int,
    read_kinds,
    read_layers,
    refuse,
)
from cpuserve.models.decoder_row import Config, FamilyRow
from cpuserve.models.experts import add_mixture, read_experts
from cpuserve.models.llama import (
    build_decoder,
    gated_mlp,
    heads_of,
    layer_rope,
    layer_window,
    read_decoder,
    unpaired_qkv,
)
from cpuserve.models.parts import SpecParts
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId

_DEFAULTS = {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 5e5}
_KINDS = ("full_attention", "chunked_attention")
_CHUNK = 256  # kChunk in csrc/kernels/table/attention.h


def _llama4(config: Config) -> ModelSpec:
    """Return the hyperparameters in a Llama 4 config."""
    config = {key: value for key, value in config.items() if value not in (None, [])} | {
        key: config[key] for key in ("attention_chunk_size", "moe_layers") if key in config
    }
    layers = read_int(config, "num_hidden_layers", high=4096)
    interval = read_int(config, "no_rope_layer_interval", 4)
    rotated = read_flags(config, "no_rope_layers", lambda i: (i + 1) % interval > 0)
    normalized = read_bool(config, "use_qk_norm", True)
    bias = read_bool(config, "attention_bias", False)
    step = read_int(config, "interleave_moe_layer_step", 1)
    sparse = read_layers(config, "moe_layers", tuple(range(step - 1, layers, step)), layers)
    dense = read_int(config, "intermediate_size_mlp", high=1 << 24)
    expert_config = {"num_local_experts": 16, "num_experts_per_tok": 1, **config}
    parts: SpecParts = {
        "no_rope": tuple(i for i, has_rope in enumerate(rotated) if not has_rope),
        **read_experts(expert_config, count="num_local_experts", width="intermediate_size"),
        "dense_layers": tuple(i for i in range(layers) if i not in sparse),
        "qk_norm": normalized,
        "query_scale": _read_query_scale(config),
    }
    sizes = {"num_key_value_heads": 8, **_DEFAULTS, **config, "intermediate_size": dense}
    spec = read_decoder(sizes, positions=131072, qkv_bias=bias, out_bias=bias, parts=parts)
    spec.parts["windows"] = _read_sections(config, rotated, spec.max_position)
    if not normalized or spec.rope is None:
        return spec
    # The norm of queries and keys after the RoPE takes the factor of its cos and sin out again.
    return replace(spec, rope=msgspec.structs.replace(spec.rope, attention_factor=1.0))


def _read_query_scale(config: Config) -> tuple[float, int] | None:
    """Return (beta, length) for `Builder.scale_queries`; None if queries are not scaled."""
    tuned = config.get("attn_temperature_tuning", True)
    if type(tuned) not in (bool, int):  # 4 in the first published configs
        refuse("attn_temperature_tuning", tuned, "true or false")
    if not tuned:
        return None
    return read_float(config, "attn_scale", 0.1), read_int(config, "floor_scale", 8192)


def _read_sections(config: Config, rotated: tuple[bool, ...], positions: int) -> tuple[int, ...]:
    """Return how many positions a section of each layer has; 0: it sees the whole text."""
    size = 0
    if config.get("attention_chunk_size", 8192) is not None:
        size = read_int(config, "attention_chunk_size", 8192)
    kinds = read_kinds(config, "layer_types", _KINDS, lambda i: _KINDS[rotated[i] and size > 0])
    if _KINDS[1] in kinds and not size:
        refuse("attention_chunk_size", None, "a number, because layers have chunked attention")
    if size >= positions:
        return (0,) * len(kinds)
    if size % _CHUNK:
        refuse("attention_chunk_size", size, f"a multiple of {_CHUNK}")
    return tuple(size if kind == _KINDS[1] else 0 for kind in kinds)


def _attention(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's attention of h to x.

    In the source, queries and keys are normalized after the RoPE. A rotation does not change the
    mean square of a head, and the norm has no weight, so it is the same before the RoPE.
    """
    prefix, d, rope = f"model.layers.{layer}.self_attn", s.head_dim, layer_rope(s, layer)
    if rope is None:
        qkv = heads_of(b, s, prefix, h)
    else:
        parts = unpaired_qkv(s, prefix, rope.rotary)
        qkv = b.linear(h, list(parts), features=list(parts.values()), bias=s.qkv_bias, use="qkv")
        if s.parts["qk_norm"]:
            b.part_norm(qkv, None, width=d, parts=s.q_heads + s.kv_heads)
    scale = s.parts["query_scale"]
    if rope is None and scale is not None:
        b.scale_queries(qkv, s.q_heads * d, beta=scale[0], length=scale[1], ahead=1)
    b.rope_store_kv(qkv, layer=layer, rope=rope)
    window = layer_window(s, layer)
    a = b.attention(qkv, layer=layer, window=window, sections=window > 0)
    b.linear(a, f"{prefix}.o_proj", bias=s.out_bias, add_to=x, use="output")


def _mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add to x the experts of h, chosen and shared, or the plain MLP of h."""
    prefix = f"model.layers.{layer}.feed_forward"
    if layer in s.parts["dense_layers"]:
        gated_mlp(b, s, prefix, h, s.intermediate, to=x)
        return
    add_mixture(
        b,
        s,
        prefix,
        h,
        x,
        renormalize=False,
        score="chosen_sigmoid",
        router="router",
        weigh_inputs=True,
    )
    width = s.parts["expert_width"]
    gated_mlp(b, s, f"{prefix}.shared_expert", h, width, to=x)


Llama4 = FamilyRow(
    "Llama 4 Scout and Maverick (text): every fourth layer has no RoPE, and sees the whole text."
    " Source: transformers modeling_llama4.",
    _llama4,
    partial(build_decoder, attention=_attention, mlp=_mlp),
)
