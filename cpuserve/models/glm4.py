"""GLM-4-9B and GLM-4-0414 (dense), and the mixtures GLM-4.5, 4.6 and Solar Open: rows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from cpuserve.models.config import read_bool, read_float, read_int, read_object
from cpuserve.models.decoder_row import ATTENTION_BIAS, Config, DecoderRow, with_head_dim
from cpuserve.models.experts import (
    read_experts,
    read_first_dense,
    read_groups,
    sigmoid_mixture,
)
from cpuserve.models.llama import (
    attend,
    build_decoder,
    build_sandwich,
    fused_mlp,
    paired_attention,
    plain_mlp,
    self_attention,
)
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder

NORMS = (
    "input_layernorm",
    "post_self_attn_layernorm",
    "post_attention_layernorm",
    "post_mlp_layernorm",
)


def _split_pairs(spec: ModelSpec, config: Config) -> ModelSpec:
    """Return the spec with parts["split_pairs"], `split` of `row_order`.

    It is for GGUF files of the model or an adapter. The converter moves the pairs of models with
    M-RoPE apart.
    """
    ropes = (read_object(config, key) for key in ("rope_parameters", "rope_scaling"))
    is_split = config.get("split_pairs")
    if is_split is None and spec.rope and any("mrope_section" in rope for rope in ropes):
        is_split = spec.rope.rotary
    return replace(spec, parts={"split_pairs": is_split}) if is_split else spec


Glm = DecoderRow(
    "GLM-4-9B and GLM-Edge: Llama with half of a head rotated. Source: modeling_glm.",
    positions=131072,
    layers=partial(build_decoder, attention=paired_attention, mlp=fused_mlp),
    prepare=with_head_dim(128),
    defaults={"rms_norm_eps": 1.5625e-7},
    null_defaults={"partial_rotary_factor": 0.5},
    bias=("attention_bias", True),
    out_bias=False,
    finish=_split_pairs,
)

Glm4 = replace(
    Glm,
    about="GLM-4-0414: norms around each part, half of a head rotated. Source: modeling_glm4.",
    layers=partial(
        build_sandwich,
        attention=partial(attend, paired=True),
        norms=NORMS,
        mlp=partial(plain_mlp, fused=True),
    ),
)


def _glm4_moe(config: Config) -> dict[str, Any]:
    return {
        "parts": {
            **read_experts(config, count="n_routed_experts", width="moe_intermediate_size"),
            "shared": read_int(config, "n_shared_experts", 1),
            "dense_layers": read_first_dense(config, 1),
            "groups": read_groups(config, (1, 1), best=2),
            "expert_scale": read_float(config, "routed_scaling_factor", 1.0),
            "renormalize": read_bool(config, "norm_topk_prob", True),
            "qk_norm": read_bool(config, "use_qk_norm", False),
        }
    }


def _glm4_moe_layers(b: Builder, s: ModelSpec) -> None:
    attention = partial(self_attention, qk_norm=s.parts["qk_norm"])
    build_decoder(b, s, attention=attention, mlp=sigmoid_mixture)


Glm4Moe = DecoderRow(
    "GLM-4.5 and 4.6: experts chosen by a sigmoid and a bias. Source: modeling_glm4_moe.",
    positions=131072,
    layers=_glm4_moe_layers,
    defaults={"rms_norm_eps": 1e-5},
    null_defaults={"partial_rotary_factor": 0.5},
    bias=ATTENTION_BIAS,
    out_bias=False,
    read_arguments=_glm4_moe,
)


def _solar_open(config: Config) -> Config:
    """Return the config with the values of keys that transformers does not read."""
    overrides = {"first_k_dense_replace": 0, "use_qk_norm": False, "intermediate_size": 1}
    return {**config, **overrides}  # every layer has experts


SolarOpen = replace(
    Glm4Moe,
    about="Solar Open 100B: GLM-4.5 with experts in all layers. Source: modeling_solar_open.",
    prepare=_solar_open,
    defaults={
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "rope_theta": 1e6,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1280,
    },
    null_defaults={"partial_rotary_factor": 1.0},
)
