"""GLM-4-9B and GLM-4-0414 (dense), and the mixtures GLM-4.5 and 4.6."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from cpuserve.models.config import read_bool, read_float, read_int, read_object
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
    read_decoder,
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


class Glm:
    """GLM-4-9B and GLM-Edge: Llama with half of a head rotated. Source: modeling_glm."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a GLM config."""
        return Glm4.spec(config)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        build_decoder(b, s, attention=paired_attention, mlp=fused_mlp)


class Glm4:
    """GLM-4-0414: norms around each part, half of a head rotated. Source: modeling_glm4."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a GLM-4 config.

        parts["split_pairs"]: `split` of `row_order`, for GGUF files of the model or an adapter. The
          converter moves the pairs of models with M-RoPE apart.
        """
        spec = read_decoder(
            {
                "rms_norm_eps": 1.5625e-7,
                **_half_rotated(config),
                "head_dim": read_int(config, "head_dim", 128),
            },
            positions=131072,
            qkv_bias=read_bool(config, "attention_bias", True),
        )
        ropes = (read_object(config, key) for key in ("rope_parameters", "rope_scaling"))
        split = config.get("split_pairs")
        if split is None and spec.rope and any("mrope_section" in each for each in ropes):
            split = spec.rope.rotary
        return replace(spec, parts={"split_pairs": split}) if split else spec

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        build_sandwich(
            b,
            s,
            attention=partial(attend, paired=True),
            norms=NORMS,
            mlp=partial(plain_mlp, fused=True),
        )


class Glm4Moe:
    """GLM-4.5 and 4.6: experts chosen by a sigmoid and a bias. Source: modeling_glm4_moe."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a GLM-4.5 config."""
        return read_decoder(
            {"rms_norm_eps": 1e-5, **_half_rotated(config)},
            positions=131072,
            qkv_bias=read_bool(config, "attention_bias", False),
            parts={
                **read_experts(config, count="n_routed_experts", width="moe_intermediate_size"),
                "shared": read_int(config, "n_shared_experts", 1),
                "dense_layers": read_first_dense(config, 1),
                "groups": read_groups(config, (1, 1), best=2),
                "expert_scale": read_float(config, "routed_scaling_factor", 1.0),
                "renormalize": read_bool(config, "norm_topk_prob", True),
                "qk_norm": read_bool(config, "use_qk_norm", False),
            },
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        attention = partial(self_attention, qk_norm=s.parts["qk_norm"])
        build_decoder(b, s, attention=attention, mlp=sigmoid_mixture)


class SolarOpen:
    """Solar Open 100B: GLM-4.5 with experts in all layers. Source: modeling_solar_open."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Solar Open config; whole heads are rotated."""
        share = config.get("partial_rotary_factor")
        defaults = {"head_dim": 128, "rope_theta": 1e6, "n_routed_experts": 128}
        # transformers reads neither key, and every layer has experts.
        fixed = {"first_k_dense_replace": 0, "use_qk_norm": False, "intermediate_size": 1}
        return Glm4Moe.spec(
            {
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 1280,
                **defaults,
                **config,
                **fixed,
                "partial_rotary_factor": 1.0 if share is None else share,
            }
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        Glm4Moe.build(b, s)


def _half_rotated(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config, where by default half of the columns of a head are rotated."""
    share = config.get("partial_rotary_factor")
    return {**config, "partial_rotary_factor": 0.5 if share is None else share}
