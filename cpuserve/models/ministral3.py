"""Ministral 3 and Mistral Small 4: queries are scaled by their positions."""

from __future__ import annotations

from functools import partial
from typing import Any

from cpuserve.models.config import read_bool, read_int, read_object, refuse
from cpuserve.models.decoder_row import Config, DecoderRow, FamilyRow
from cpuserve.models.deepseek import build_latent, read_latent
from cpuserve.models.experts import read_first_dense, read_groups
from cpuserve.models.rope import ORIGINAL, read_query_scale
from cpuserve.models.spec import ModelSpec


def _rope(config: Config, default: Config) -> dict[str, Any]:
    """Return rope_scaling with rope_parameters; YaRN with `default` if both are empty."""
    params = {**read_object(config, "rope_scaling"), **read_object(config, "rope_parameters")}
    yarn = {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
    return params or {**yarn, **default}


def _ministral3(config: Config) -> Config:
    rope = _rope(config, {"rope_theta": 1e6, "factor": 16.0, ORIGINAL: 16384})
    return {**config, "rope_scaling": None, "rope_parameters": rope}


def _scaled_queries(config: Config) -> dict[str, Any]:
    window = read_int(config, "sliding_window", 0, low=0)
    return {"window": window, "parts": {"query_scale": read_query_scale(config)}}


Ministral3 = DecoderRow(
    "Ministral 3 (3B, 8B, 14B): Mistral with queries scaled by position."
    " Source: transformers modeling_ministral3.",
    positions=262144,
    prepare=_ministral3,
    defaults={"rms_norm_eps": 1e-5, "head_dim": 128},
    read_arguments=_scaled_queries,
)


def _mistral4(config: Config) -> ModelSpec:
    rope = _rope(config, {"rope_theta": 1e4, "factor": 128.0, ORIGINAL: 8192})
    if read_groups(config, (1, 1), best=2) is not None:
        refuse("topk_group", config.get("topk_group"), "n_group: no limit to groups of experts")
    # partial_rotary_factor, the share of a head's dims that are rotated, is not needed:
    # qk_rope_head_dim is the number of these dims.
    rope["partial_rotary_factor"] = None
    config = {"n_shared_experts": 1, **config, "rope_scaling": None, "rope_parameters": rope}
    return read_latent(
        {**config, "q_lora_rank": config.get("q_lora_rank", 1024)},
        positions=1048576,
        dense=read_first_dense(config, 0),
        groups=None,
        renormalize=read_bool(config, "norm_topk_prob", True),
        interleaved=read_bool(config, "rope_interleave", True),
    )


Mistral4 = FamilyRow(
    "Mistral Small 4: latent attention, experts chosen by a softmax, and scaled queries."
    " Source: transformers modeling_mistral4.",
    _mistral4,
    partial(build_latent, score="softmax"),
)
