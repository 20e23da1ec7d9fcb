"""LFM2, LFM2-MoE and LFM3: layers of short convolutions with gates, or attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.models.config import (
    read_bool,
    read_float,
    read_heads,
    read_int,
    read_kinds,
    read_taps,
    refuse,
)
from cpuserve.models.experts import add_mixture, read_experts
from cpuserve.models.llama import LayerPart, attend, finish_decoder, read_decoder
from cpuserve.models.parts import SpecParts
from cpuserve.models.rope import split_ropes
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import StoredNames, experts_by_number
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId
from cpuserve.program.parts import rows

KINDS = ("conv", "full_attention")


class Lfm2:
    """LFM2 and 2.5: short convolutions with gates, and attention in some layers.

    Source: transformers modeling_lfm2.
    """

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in an LFM2 config."""
        key = "intermediate_size" if config.get("block_ff_dim") is None else "block_ff_dim"
        width = read_int(config, key, high=1 << 24)
        if read_bool(config, "block_auto_adjust_ff_dim", True):
            width = _adjusted(config, width)
        return _spec({**config, "intermediate_size": width}, {})

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        _build(b, s, _mlp)


class Lfm2Moe:
    """LFM2 with experts, except in the first layers. Source: transformers modeling_lfm2_moe."""

    stored = StoredNames(experts_by_number("feed_forward", "feed_forward"))

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in an LFM2-MoE config."""
        parts: SpecParts = {
            **read_experts(config, count="num_experts", width="moe_intermediate_size"),
            "dense_layers": tuple(range(min(read_int(config, "num_dense_layers", low=0), 4096))),
            "renormalize": read_bool(config, "norm_topk_prob", True),
            "expert_bias": read_bool(config, "use_expert_bias", True),
            "expert_scale": read_float(config, "routed_scaling_factor", 1.0),
        }
        return _spec(config, parts)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        _build(b, s, _sparse_mlp)


def _spec(config: Mapping[str, Any], parts: SpecParts) -> ModelSpec:
    conv: SpecParts = {
        "attends": tuple(kind == "full_attention" for kind in _kinds(config)),
        "taps": read_taps(config, "conv_L_cache", 3),
        "conv_bias": read_bool(config, "conv_bias", False),
    }
    tied = read_bool(config, "tie_embedding", read_bool(config, "tie_word_embeddings", True))
    # The activation is always SiLU, even if hidden_act has another value.
    settings = {k: v for k, v in config.items() if v is not None and k != "hidden_act"}
    return read_decoder(
        {"rope_theta": 1e6, "norm_eps": 1e-5, **settings, "tie_word_embeddings": tied},
        positions=128000,
        eps="norm_eps",
        parts={**parts, **conv},
    )


def _kinds(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the kind of each layer; without layer_types, full_attn_idxs lists attention layers."""
    full_layers = config.get("full_attn_idxs")
    if full_layers is not None and (
        not isinstance(full_layers, list) or not all(type(i) is int for i in full_layers)
    ):
        refuse("full_attn_idxs", full_layers, "a list of layer numbers or null")
    return read_kinds(
        config, "layer_types", KINDS, lambda i: KINDS[full_layers is None or i in full_layers]
    )


def _adjusted(config: Mapping[str, Any], width: int) -> int:
    """Return the width of the MLP: two thirds of `width`, times block_ffn_dim_multiplier.

    The width is rounded up to a multiple of block_multiple_of, unless the multiplier is null.
    """
    if config.get("block_ffn_dim_multiplier", 1.0) is None:
        return int(2 * width / 3)
    of = read_int(config, "block_multiple_of", 256)
    factor = read_float(config, "block_ffn_dim_multiplier", 1.0)
    return -(-int(factor * int(2 * width / 3)) // of) * of


def _build(b: Builder, s: ModelSpec, mlp: LayerPart) -> None:
    x = b.embed("model.embed_tokens")
    for i in range(s.layers):
        prefix = f"model.layers.{i}"
        _mix(b, s, i, b.rms_norm(x, f"{prefix}.operator_norm"), x)
        mlp(b, s, i, b.rms_norm(x, f"{prefix}.ffn_norm"), x)
    finish_decoder(b, s, b.rms_norm(x, "model.embedding_norm"))


def _mix(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the attention or the short convolution of h to x, whichever the layer has."""
    attends = s.parts["attends"]
    prefix = f"model.layers.{layer}"
    if attends[layer]:
        _attention(b, s, f"{prefix}.self_attn", sum(attends[:layer]), h, x)
    else:
        short_convolution(b, s, f"{prefix}.conv", h, x)


def _attention(b: Builder, s: ModelSpec, prefix: str, layer: int, h: ValueId, x: ValueId) -> None:
    """Add attention of h to x. layer: the number of this layer among the attention layers."""
    d = s.head_dim
    features = [s.q_heads * d, s.kv_heads * d, s.kv_heads * d]
    qkv = b.linear(h, [f"{prefix}.{n}_proj" for n in "qkv"], features=features, use="qkv")
    q_norm, k_norm = (f"{prefix}.{n}_layernorm" for n in "qk")
    b.rope_store_kv(qkv, layer=layer, rope=s.rope, q_norm=q_norm, k_norm=k_norm)
    b.linear(b.attention(qkv, layer=layer), f"{prefix}.out_proj", add_to=x)


def short_convolution(
    b: Builder, s: ModelSpec, prefix: str, h: ValueId, to: ValueId | None
) -> ValueId:
    """Return out_proj(C * conv(B * v)); if `to` is not None, add it to `to` and return `to`.

    B, C and v are three equal parts of in_proj(h).
    """
    bias, width = s.parts["conv_bias"], s.width
    name = f"{prefix}.in_proj"
    gates = b.linear(h, rows(name, 0, 2 * width), features=2 * width, bias=bias)
    conv_input = b.linear(h, rows(name, 2 * width, width), features=width, bias=bias)
    b.multiply(gates, to=conv_input)
    mixed = b.short_conv(conv_input, f"{prefix}.conv", taps=s.parts["taps"], bias=bias)
    b.multiply(gates, to=mixed, column=width)
    return b.linear(mixed, f"{prefix}.out_proj", features=width, bias=bias, add_to=to)


def lfm_mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, to: ValueId | None) -> ValueId:
    """Return the layer's gated MLP of h; if `to` is not None, add it to `to` and return `to`."""
    prefix = f"model.layers.{layer}.feed_forward"
    g = b.linear(h, [f"{prefix}.w1", f"{prefix}.w3"], features=s.intermediate, then="silu_mul")
    return b.linear(g, f"{prefix}.w2", features=s.width, add_to=to, use="down")


def _mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's gated MLP of h to x."""
    lfm_mlp(b, s, layer, h, x)


def _sparse_mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's experts of h to x; the first layers have a gated MLP instead.

    transformers adds 1e-6 to the sum of a token's expert weights before it divides them by the sum;
    this program does not.
    """
    if layer in s.parts["dense_layers"]:
        _mlp(b, s, layer, h, x)
        return
    prefix = f"model.layers.{layer}.feed_forward"
    add_mixture(
        b,
        s,
        prefix,
        h,
        x,
        parts=("w1", "w3", "w2"),
        renormalize=s.parts["renormalize"],
        score="sigmoid",
        scale=s.parts["expert_scale"],
        bias=f"{prefix}.expert_bias" if s.parts["expert_bias"] else None,
    )


KINDS_3 = ("conv", "sliding_attention", "full_attention")
POSITIONS = 128000
# The RoPE of layers without a window rotates half of the dimensions of a head.
FULL_ROPE = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5}


class Lfm3:
    """LFM3: LFM2 with windows, norms of results, and gates of heads. Source: modeling_lfm3."""

    stored = StoredNames({r"\.self_attn\.g_proj\.": ".self_attn.gate_proj."})

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in an LFM3 config."""
        settings = {k: v for k, v in config.items() if v is not None and k != "hidden_act"}
        # The activation is always SiLU, even if hidden_act has another value.
        # The name rms_norm_eps means the same, and goes before.
        settings["norm_eps"] = settings.get("rms_norm_eps", settings.get("norm_eps", 1e-5))
        config = {"tie_word_embeddings": True, **settings}
        config["head_dim"] = read_int(config, "head_dim", 128)
        kinds = read_kinds(config, "layer_types", KINDS_3, _default_kind)
        window = read_int(config, "sliding_window", 256)
        _, _, head_dim = read_heads(config, read_int(config, "hidden_size", high=1 << 20))
        if config.get("rope_parameters") is None:
            config["rope_parameters"] = {"full_attention": FULL_ROPE}
        config, local_rope = split_ropes(config, head_dim, POSITIONS, theta=1e6, local_theta=1e4)
        bias = read_bool(config, "attention_bias", False)
        parts: SpecParts = {
            "kinds": kinds,
            "windows": tuple(window if kind == KINDS_3[1] else 0 for kind in kinds),
            "local_rope": local_rope,
            "taps": read_taps(config, "conv_L_cache", 7),
            "conv_bias": read_bool(config, "conv_bias", False),
            "norms_results": read_bool(config, "use_sandwich_norm", True),
            "gated": read_bool(config, "use_attention_gate", True),
        }
        return read_decoder(
            config,
            positions=POSITIONS,
            eps="norm_eps",
            qkv_bias=bias,
            out_bias=bias,
            parts=parts,
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        kinds = s.parts["kinds"]
        norms = s.parts["norms_results"]
        x = b.embed("model.embed_tokens")
        to = None if norms else x
        for i, kind in enumerate(kinds):
            prefix = f"model.layers.{i}"
            h = b.rms_norm(x, f"{prefix}.operator_norm")
            if kind == "conv":
                out = short_convolution(b, s, f"{prefix}.conv", h, to)
            else:
                out = _gated_attention(b, s, i, i - kinds[:i].count("conv"), h, to)
            if norms:
                b.add(b.rms_norm(out, f"{prefix}.post_operator_norm"), to=x)
            out = lfm_mlp(b, s, i, b.rms_norm(x, f"{prefix}.ffn_norm"), to)
            if norms:
                b.add(b.rms_norm(out, f"{prefix}.post_ffn_norm"), to=x)
        finish_decoder(b, s, b.rms_norm(x, "model.embedding_norm"))


def _default_kind(layer: int) -> str:
    if layer % 4 == 2:
        return "full_attention"
    return "sliding_attention" if layer % 4 == 0 and layer else "conv"


def _gated_attention(
    b: Builder, s: ModelSpec, layer: int, cache: int, h: ValueId, to: ValueId | None
) -> ValueId:
    """Return the attention of h, added to `to` unless it is None; a gate multiplies each head.

    cache: the number of this layer's KV cache: only attention layers have one.
    """
    prefix = f"model.layers.{layer}.self_attn"
    a = attend(b, s, layer, h, qk_norm=True, cache=cache)
    if s.parts["gated"]:
        b.gate(b.linear(h, f"{prefix}.gate_proj", features=s.q_heads), to=a, heads=s.q_heads)
    return b.linear(
        a, f"{prefix}.o_proj", features=s.width, bias=s.out_bias, add_to=to, use="output"
    )
