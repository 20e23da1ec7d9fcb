"""Command R and Aya (Cohere), Command R7B and A (Cohere 2), and Cohere 2 with experts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from cpuserve.models.config import (
    read_bool,
    read_choice,
    read_float,
    read_heads,
    read_int,
    read_object,
    read_windows,
)
from cpuserve.models.decoder_row import (
    ATTENTION_BIAS,
    Config,
    DecoderRow,
    read_roped_windows,
    when_empty,
)
from cpuserve.models.experts import add_mixture, read_dense_layers, read_experts
from cpuserve.models.head_norms import head_norm_attention
from cpuserve.models.llama import (
    build_decoder,
    gated_mlp,
    paired_attention,
    rms_norm,
)
from cpuserve.models.parts import SpecParts
from cpuserve.models.rope import read_rope
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import Rope, RouterScore, ValueId


def cohere_norm(b: Builder, x: ValueId, name: str) -> ValueId:
    """Return the layer norm of x, without bias."""
    return b.layer_norm(x, name, bias=False)


def _normed_attention(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's attention of h to x; each head of q and k has a layer norm (Command R+)."""
    prefix = f"model.layers.{layer}.self_attn"
    head_norm_attention(b, s, layer, h, x, q=f"{prefix}.q_norm", k=f"{prefix}.k_norm", paired=True)


_build = partial(build_decoder, attention=paired_attention, norm=cohere_norm, parallel=True)
_with_eps = when_empty(layer_norm_eps=1e-5)


def _cohere_layers(b: Builder, s: ModelSpec) -> None:
    _build(b, s, attention=_normed_attention if s.parts["head_norm"] else paired_attention)


def _logit_scale(spec: ModelSpec, config: Config) -> ModelSpec:
    return replace(spec, logit_scale=read_float(config, "logit_scale", 0.0625))


Cohere = DecoderRow(
    "Command R: attention and MLP read the same input. Source: transformers modeling_cohere.",
    positions=8192,
    layers=_cohere_layers,
    prepare=_with_eps,
    defaults={"rope_theta": 500000.0},
    null_defaults={"tie_word_embeddings": True},
    bias=ATTENTION_BIAS,
    eps="layer_norm_eps",
    read_arguments=lambda config: {"parts": {"head_norm": read_bool(config, "use_qk_norm", False)}},
    finish=_logit_scale,
)


def _cohere2(config: Config) -> dict[str, Any]:
    pattern = read_int(config, "sliding_window_pattern", 4)
    window = read_int(config, "sliding_window", 4096, low=0)
    return {"parts": read_roped_windows(config, window, lambda i: (i + 1) % pattern > 0)}


Cohere2 = replace(
    Cohere,
    about="Command R7B: three layers with a window and RoPE, then a layer with neither, and so on."
    " Source: transformers modeling_cohere2.",
    layers=_build,
    defaults={},
    read_arguments=_cohere2,
)


def _compass_ropes(config: Config) -> Config:
    """Return the config with the RoPE of each kind of layers, or None, under the kind."""
    by_kind = read_object(config, "rope_parameters")
    _, _, head_dim = read_heads(config, read_int(config, "hidden_size", high=1 << 20))
    rope_config = {**config, "rope_parameters": None}
    kinds = ("full_attention", "sliding_attention")
    has_kinds = bool({*by_kind} & {*kinds})  # otherwise both kinds have the same RoPE
    ropes: dict[str, Rope | None] = {}
    for kind in kinds:
        kind_rope = by_kind.get(kind, {}) if has_kinds else by_kind
        if kind_rope is None:
            ropes[kind] = None
        else:
            ropes[kind], _ = read_rope(
                {**rope_config, "rope_parameters": kind_rope}, head_dim, 8192
            )
    return {**_with_eps(rope_config), **ropes}


def _compass(config: Config) -> dict[str, Any]:
    window = read_int(config, "sliding_window", 4096, low=0)
    windows = read_windows(config, window, default=lambda _layer: False)
    full, local = config["full_attention"], config["sliding_attention"]
    return {
        "parts": {
            "windows": windows,
            "ropes": tuple(local if keys else full for keys in windows),
        }
    }


def _any_rope(spec: ModelSpec, config: Config) -> ModelSpec:
    rope = config["full_attention"] or config["sliding_attention"]
    return replace(_logit_scale(spec, config), rope=rope)


CohereCompass = replace(
    Cohere2,
    about="North Micro Vision, text: Command R, where kinds of layers may differ in RoPE or have"
    " none. Source: transformers modeling_cohere_compass.",
    layers=partial(build_decoder, norm=cohere_norm, parallel=True),
    prepare=_compass_ropes,
    null_defaults={"tie_word_embeddings": True, "logit_scale": 1.0},
    read_arguments=_compass,
    finish=_any_rope,
)


def _read_windows(config: Config, dense_layers: int, dense: tuple[int, ...]) -> SpecParts:
    """Return the entries of ModelSpec.parts for windows of layers and for layers without a RoPE.

    dense_layers: the number of layers at the beginning, which have their own pattern of windows.

    Layers without a window have no RoPE, except layers with a dense MLP
    in models where none of the first layers has a window.
    """
    dense_pattern = read_int(config, "prefix_dense_sliding_window_pattern", 1)
    pattern = read_int(config, "sliding_window_pattern", 4)
    windows = read_windows(
        config,
        read_int(config, "sliding_window", 4096, low=0),
        default=lambda i: (i + 1) % dense_pattern > 0
        if i < dense_layers
        else (i - dense_layers + 1) % pattern > 0,
    )
    roped_layers = dense if dense_pattern == 1 else ()
    no_rope = tuple(i for i, keys in enumerate(windows) if not keys and i not in roped_layers)
    return {"windows": windows, "no_rope": no_rope}


def _mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add to x the layer's experts and shared experts of h, or their mean, or a plain MLP."""
    prefix, shared_width = f"model.layers.{layer}.mlp", s.parts["shared_width"]
    if layer in s.parts["dense_layers"]:
        gated_mlp(b, s, prefix, h, s.parts["dense_width"], to=x)
        return
    share = 0.5 if shared_width and s.parts["mean"] else 1.0
    score: RouterScore = "sigmoid" if s.parts["sigmoid"] else "chosen_softmax"
    add_mixture(
        b,
        s,
        prefix,
        h,
        x,
        renormalize=bool(s.parts["sigmoid"] and s.parts["renormalize"]),
        score=score,
        scale=share,
    )
    if shared_width:
        out = gated_mlp(b, s, f"{prefix}.shared_experts", h, shared_width)
        b.multiply_by(out, share)
        b.add(out, to=x)


def _cohere2_moe_layers(b: Builder, s: ModelSpec) -> None:
    _build(b, s, mlp=_mlp, norm=rms_norm if s.parts["rms"] else cohere_norm)


def _cohere2_moe_keys(config: Config) -> Config:
    if config.get("rms_norm_eps") is not None:
        config = {**config, "layer_norm_eps": config["rms_norm_eps"]}
    return {**_with_eps(config), "head_dim": read_int(config, "head_dim", 128)}


def _cohere2_moe(config: Config) -> dict[str, Any]:
    width = read_int(config, "intermediate_size", high=1 << 24)
    dense_count = read_int(config, "first_k_dense_replace", 0, low=0)
    dense = read_dense_layers(config, first=dense_count)
    sigmoid = {"softmax": False, "sigmoid": True}
    mean = {"average": True, "sum": False}
    return {
        "parts": {
            **_read_windows(config, dense_count, dense),
            **read_experts(config, count="num_experts", width="intermediate_size"),
            "shared_width": width * read_int(config, "num_shared_experts", 0, low=0),
            "dense_layers": dense,
            "dense_width": read_int(config, "prefix_dense_intermediate_size", width, high=1 << 24),
            "sigmoid": read_choice(config, "expert_selection_fn", "softmax", sigmoid),
            "renormalize": read_bool(config, "norm_topk_prob", True),
            "mean": read_choice(config, "shared_expert_combination_strategy", "average", mean),
            "rms": config.get("rms_norm_eps") is not None,
        }
    }


Cohere2Moe = replace(
    Cohere2,
    about="Cohere 2 with experts: the result may be the mean of routed and shared experts."
    " Source: transformers modeling_cohere2_moe.",
    layers=_cohere2_moe_layers,
    prepare=_cohere2_moe_keys,
    read_arguments=_cohere2_moe,
)
