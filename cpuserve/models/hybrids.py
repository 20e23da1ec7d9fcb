"""The table of decoders with attention in some layers, and states in the others."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from cpuserve.models.config import (
    read_bool,
    read_choice,
    read_float,
    read_int,
    read_kinds,
    refuse,
)
from cpuserve.models.decoder_row import (
    ATTENTION_BIAS,
    MLP_BIAS,
    Config,
    DecoderRow,
    without_nulls,
)
from cpuserve.models.delta_nets import read_delta
from cpuserve.models.experts import add_mixture, qwen_mlp, read_experts, read_shared_experts
from cpuserve.models.llama import attend_in_some, build_decoder, gated_mlp
from cpuserve.models.mamba import add_mamba1, mamba2_layer, read_mamba1, read_mamba2
from cpuserve.models.parts import SpecParts
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import StoredNames
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId
from cpuserve.program.parts import rows

# The norms of layers, and the last norm, of Bamba and Jamba.
_build = partial(
    build_decoder,
    norms=("input_layernorm", "pre_ff_layernorm"),
    final_norm="model.final_layernorm",
)


def _feed_forward(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's gated MLP of h to x."""
    gated_mlp(b, s, f"model.layers.{layer}.feed_forward", h, s.intermediate, to=x)


def _bamba(config: Config) -> dict[str, Any]:
    layers = read_int(config, "num_hidden_layers", high=4096)
    attention_layers = config.get("attn_layer_indices") or []
    if not isinstance(attention_layers, list) or not all(type(i) is int for i in attention_layers):
        refuse("attn_layer_indices", attention_layers, "a list of layer numbers")
    attends = tuple(i in attention_layers for i in range(layers))
    return {"parts": {"attends": attends, "mamba2": read_mamba2(config)}}


Bamba = DecoderRow(
    "Bamba 9B. Source: transformers modeling_bamba.",
    positions=262144,
    layers=partial(
        _build, attention=partial(attend_in_some, state=mamba2_layer), mlp=_feed_forward
    ),
    defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 8},
    overrides={"partial_rotary_factor": 0.5},  # rope_parameters may have another one
    bias=ATTENTION_BIAS,
    mlp_bias=MLP_BIAS,
    read_arguments=_bamba,
)


_MAMBA_KEYS = {
    "expand": "mamba_expand",
    "state_size": "mamba_d_state",
    "conv_kernel": "mamba_d_conv",
    "use_conv_bias": "mamba_conv_bias",
    "use_bias": "mamba_proj_bias",
    "time_step_rank": "mamba_dt_rank",
}


def _every(config: Config, kind: str, default: tuple[int, int], layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it is one of every `{kind}_period`, from `{kind}_offset` on."""
    period = read_int(config, f"{kind}_period", default[0], high=65536)
    offset = config.get(f"{kind}_offset", default[1])
    if type(offset) is not int or not 0 <= offset < period:
        refuse(f"{kind}_offset", offset, f"a number below {kind}_period, {period}")
    return tuple(i % period == offset for i in range(layers))


def _jamba(config: Config) -> dict[str, Any]:
    layers = read_int(config, "num_hidden_layers", high=4096)
    eps = read_float(config, "rms_norm_eps", 1e-6)
    parts: SpecParts = {
        "attends": _every(config, "attn_layer", (8, 4), layers),
        "sparse": (False,) * layers,
        "mamba1": read_mamba1(config, _MAMBA_KEYS, "weights", eps),
    }
    if read_int(config, "num_experts", 16, high=65536) > 1:
        parts["sparse"] = _every(config, "expert_layer", (2, 1), layers)
        parts |= read_experts(config, count="num_experts", width="intermediate_size")
    return {"parts": parts}


def _mamba1(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's Mamba 1 of h to x."""
    add_mamba1(b, s.parts["mamba1"], f"model.layers.{layer}.mamba", h, x)


def _jamba_mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's experts of h, or else its plain MLP of h, to x."""
    if s.parts["sparse"][layer]:
        prefix = f"model.layers.{layer}.feed_forward"
        add_mixture(b, s, prefix, h, x, renormalize=False, router="router")
    else:
        _feed_forward(b, s, layer, h, x)


Jamba = DecoderRow(
    "Jamba 1.5 to 2 and Jamba Reasoning 3B: no RoPE. Source: transformers modeling_jamba.",
    positions=262144,
    layers=partial(_build, attention=partial(attend_in_some, state=_mamba1), mlp=_jamba_mlp),
    defaults={"num_key_value_heads": 8, "num_experts": 16, "num_experts_per_tok": 2},
    read_arguments=_jamba,
    finish=lambda spec, _config: replace(spec, rope=None),
)


_NET, _WINDOW, _WHOLE = _KINDS = ("linear_attention", "sliding_attention", "full_attention")
_PATTERN = (_NET, _WINDOW, _NET, _WHOLE, _WINDOW)


def _lara_mini_keys(config: Config) -> Config:
    """Return the config without nulls, and with the width that MLPs would have."""
    config = without_nulls(config)
    return {**config, "intermediate_size": config.get("moe_intermediate_size", 512)}


def _lara_mini(config: Config) -> dict[str, Any]:
    kinds = read_kinds(config, "layer_types", _KINDS, lambda i: _PATTERN[i % len(_PATTERN)])
    # The convolutions of gated delta nets have this activation as well.
    read_choice(config, "hidden_act", "silu", {"silu": "silu", "swish": "silu"})
    window = read_int(config, "sliding_window", 512)
    return {
        "parts": {
            **read_shared_experts(config, renormalize=read_bool(config, "norm_topk_prob", True)),
            "dense_layers": (),
            "windows": tuple(window if kind == _WINDOW else 0 for kind in kinds),
            "no_rope": tuple(i for i, kind in enumerate(kinds) if kind == _WHOLE),
            "attends": tuple(kind != _NET for kind in kinds),
            "delta": read_delta(config, key_heads=8, value_heads=16),
        }
    }


def _delta_net(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's gated delta net of h to x."""
    prefix, sizes = f"model.layers.{layer}.linear_attn", s.parts["delta"]
    values = sizes["value_heads"] * sizes["value_width"]
    # The rows of the matrix are queries, keys, values, gates of the output, and b and a of heads.
    qkv_width = 2 * (sizes["key_heads"] * sizes["key_width"] + values)
    inputs = b.linear(h, rows(f"{prefix}.in_proj", 0, qkv_width), features=qkv_width)
    heads = 2 * sizes["value_heads"]
    gates = b.linear(h, rows(f"{prefix}.in_proj", qkv_width, heads), features=heads)
    out = b.gated_delta(inputs, gates, prefix, tiled=False, **sizes)
    b.linear(out, f"{prefix}.out_proj", add_to=x)


def _shared_mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the chosen experts of h, and one for all tokens, to x."""
    qwen_mlp(b, s, layer, h, x)
    prefix = f"model.layers.{layer}.mlp.shared_expert"
    gated_mlp(b, s, prefix, h, s.parts["shared_width"], to=x)


LaraMini = DecoderRow(
    "Lara Mini: only layers with a window have a RoPE. Source: transformers modeling_lara_mini.",
    positions=131072,
    layers=partial(
        build_decoder,
        attention=partial(attend_in_some, state=_delta_net, qk_norm=True),
        mlp=_shared_mlp,
    ),
    prepare=_lara_mini_keys,
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 128,
        "tie_word_embeddings": True,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    bias=ATTENTION_BIAS,
    read_arguments=_lara_mini,
    stored=StoredNames(
        joined={
            ".linear_attn.in_proj": tuple(f".linear_attn.in_proj_{n}" for n in ("qkv", *"zba"))
        },
        published={r"\.linear_attn\.out_norm\.": ".linear_attn.norm."},
    ),
)
