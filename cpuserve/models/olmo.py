"""OLMo 1 to 3, OLMoE and FlexOlmo: rows; all but OLMo 1 have RMS norms of all q heads as one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from cpuserve.models.config import read_bool, read_heads, read_int, read_windows, refuse
from cpuserve.models.decoder_row import ATTENTION_BIAS, Config, DecoderRow
from cpuserve.models.experts import add_mixture, qwen_mlp, read_experts
from cpuserve.models.llama import (
    attend,
    build_decoder,
    build_sandwich,
    read_clip,
    self_attention,
)
from cpuserve.models.parts import SpecParts
from cpuserve.models.rope import split_ropes
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId

NORMS = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
THETA3 = 500000.0  # RoPE base of OLMo 3 if the config has none


def _plain_norm(b: Builder, x: ValueId, name: str) -> ValueId:
    """Return the layer norm of x, without a weight and a bias."""
    return b.layer_norm(x, name, bias=False, weightless=True)


Olmo = DecoderRow(
    "OLMo 1: Llama with layer norms that have no weights. Source: transformers modeling_olmo.",
    positions=2048,
    layers=partial(build_decoder, norm=_plain_norm),
    overrides={"rms_norm_eps": 1e-5},
    bias=ATTENTION_BIAS,
    read_arguments=lambda config: {"parts": {"clip": read_clip(config)}},
)

_wide_attention = partial(attend, wide_norm=True)

Olmo2 = DecoderRow(
    "OLMo 2: norms after attention and MLP, none before. Source: modeling_olmo2.",
    positions=2048,
    layers=partial(build_sandwich, attention=_wide_attention, norms=NORMS),
    defaults={"rms_norm_eps": 1e-5},
    bias=ATTENTION_BIAS,
)


def _olmo3_ropes(config: Config) -> Config:
    """Return the config with the RoPE of layers without a window, and that of the others."""
    if config.get("sliding_window", 1) is None:
        refuse("sliding_window", None, "the number of keys that layers with a window see")
    _, _, head_dim = read_heads(config, read_int(config, "hidden_size", high=1 << 20))
    local_theta = config.get("rope_theta") or THETA3
    full_config, local_rope = split_ropes(
        config, head_dim, 2048, theta=THETA3, local_theta=local_theta
    )
    return {**full_config, "local_rope": local_rope}


def _olmo3(config: Config) -> dict[str, Any]:
    window = read_int(config, "sliding_window", 4096, low=0)
    windows = read_windows(config, window, default=lambda i: (i + 1) % 4 > 0)
    return {"parts": {"windows": windows, "local_rope": config["local_rope"]}}


Olmo3 = replace(
    Olmo2,
    about="OLMo 2 with a window and an unscaled RoPE in three of four layers."
    " Source: transformers modeling_olmo3.",
    prepare=_olmo3_ropes,
    read_arguments=_olmo3,
)


def _experts(config: Config) -> SpecParts:
    return {
        **read_experts(config, count="num_experts", width="intermediate_size"),
        "renormalize": read_bool(config, "norm_topk_prob", False),
        "dense_layers": (),
    }


Olmoe = DecoderRow(
    "OLMoE: norms before attention and experts, which a softmax chooses."
    " Source: transformers modeling_olmoe.",
    positions=4096,
    layers=partial(build_decoder, attention=partial(self_attention, wide_norm=True), mlp=qwen_mlp),
    defaults={"rms_norm_eps": 1e-5},
    bias=ATTENTION_BIAS,
    read_arguments=lambda config: {"parts": {**_experts(config), "clip": read_clip(config)}},
)


def _mixture(b: Builder, s: ModelSpec, layer: int, h: ValueId, to: ValueId | None) -> ValueId:
    """Return the layer's experts of h."""
    renormalize = s.parts["renormalize"]
    return add_mixture(b, s, f"model.layers.{layer}.mlp", h, to, renormalize=renormalize)


FlexOlmo = DecoderRow(
    "FlexOlmo: OLMo 2 with the experts of OLMoE. Source: transformers modeling_flex_olmo.",
    positions=4096,
    layers=partial(build_sandwich, attention=_wide_attention, norms=NORMS, mlp=_mixture),
    defaults={"rms_norm_eps": 1e-6, "rope_theta": THETA3, "num_experts": 7},
    null_defaults={"num_experts_per_tok": 5},
    bias=ATTENTION_BIAS,
    read_arguments=lambda config: {"parts": _experts(config)},
)
