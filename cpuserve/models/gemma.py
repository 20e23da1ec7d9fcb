"""Gemma 1 to 3 and VaultGemma (text): scaled embeddings, and norms with weights of 1 + w."""

from __future__ import annotations

import struct
from dataclasses import replace
from functools import partial
from typing import Any

from cpuserve.models.base import DECODER_HEAD
from cpuserve.models.config import (
    read_bool,
    read_float,
    read_int,
    read_window,
    read_windows,
    refuse,
)
from cpuserve.models.decoder_row import ATTENTION_BIAS, Config, DecoderRow
from cpuserve.models.llama import (
    SandwichNorms,
    attend,
    build_decoder,
    build_sandwich,
    offset_norm,
)
from cpuserve.models.parts import SpecParts
from cpuserve.models.rope import split_ropes
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder

NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
# The Dense modules after the pooling of EmbeddingGemma; GGUF files may have them.
DENSE = ("dense_2", "dense_3")


def read_cap(config: Config, key: str, default: float) -> float:
    """Return a soft cap of logits or scores, or 0 if the config has null, which means none."""
    return 0.0 if config.get(key, default) in (None, 0) else read_float(config, key, default)


def embed_scale(width: int, dtype: str) -> float:
    """Return the square root of the width, rounded to the checkpoint's dtype as in transformers."""
    scale = float(width**0.5)
    if dtype == "float16":
        return float(struct.unpack("<e", struct.pack("<e", scale))[0])
    if dtype == "bfloat16":  # round to nearest even: keep the upper 16 bits
        bits = int(struct.unpack("<I", struct.pack("<f", scale))[0])
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
        return float(struct.unpack("<f", struct.pack("<I", bits))[0])
    return scale


def _keys(config: Config, activation: Any) -> Config:
    """Return the config with the width of heads and the activation of MLPs."""
    if config.get("use_bidirectional_attention"):
        refuse("use_bidirectional_attention", True, "false: only causal attention is supported")
    return {
        **config,
        "head_dim": read_int(config, "head_dim", 256),
        "hidden_act": activation or "gelu_pytorch_tanh",
    }


def _gemma_keys(config: Config) -> Config:
    """Return the config of a Gemma 1.

    The first configs have "gelu", but the models were trained with its approximation.
    """
    activation = config.get("hidden_activation") or config.get("hidden_act")
    return _keys(config, None if activation == "gelu" else activation)


def _scaled_embeddings(spec: ModelSpec, _config: Config) -> ModelSpec:
    return replace(spec, embed_scale=embed_scale(spec.width, spec.dtype))


Gemma = DecoderRow(
    "Gemma 1: Llama with scaled embeddings and a gate of GELU. Source: modeling_gemma.",
    positions=8192,
    layers=partial(build_decoder, norm=offset_norm),
    prepare=_gemma_keys,
    null_defaults={"tie_word_embeddings": True},
    bias=ATTENTION_BIAS,
    finish=_scaled_embeddings,
)


def _build(b: Builder, s: ModelSpec, *, qk_norm: bool, norms: SandwichNorms = NORMS) -> None:
    softcap = s.parts.get("softcap", 0.0)
    build_sandwich(
        b,
        s,
        attention=partial(attend, qk_norm=qk_norm, plus_one=True, softcap=softcap),
        norms=norms,
        norm=offset_norm,
        softcap=s.parts["logit_softcap"],
    )


def _read_layers(config: Config, pattern: int, logit_cap: float) -> SpecParts:
    """Return the windows and the cap of logits.

    pattern: every pattern-th layer is global if the config has no layer_types.
    logit_cap: the default of the cap.
    """
    window = read_window(config, 4096)
    return {
        "windows": read_windows(config, window, default=lambda i: (i + 1) % pattern > 0),
        "logit_softcap": read_cap(config, "final_logit_softcapping", logit_cap),
    }


def _gemma2(config: Config) -> dict[str, Any]:
    softcap = read_cap(config, "attn_logit_softcapping", 50.0)
    return {"parts": {**_read_layers(config, 2, 30.0), "softcap": softcap}}


def _scaled(spec: ModelSpec, config: Config) -> ModelSpec:
    scale = read_float(config, "query_pre_attn_scalar", 256.0) ** -0.5
    return replace(_scaled_embeddings(spec, config), attention_scale=scale)


Gemma2 = DecoderRow(
    "Gemma 2: soft caps, and every second layer local. Source: transformers modeling_gemma2.",
    positions=8192,
    layers=partial(_build, qk_norm=False),
    leave=DECODER_HEAD,
    prepare=lambda config: _keys(config, config.get("hidden_activation")),
    null_defaults={"tie_word_embeddings": True},
    bias=ATTENTION_BIAS,
    read_arguments=_gemma2,
    finish=_scaled,
)

VaultGemma = replace(
    Gemma2,
    about="Gemma 2 without the norms after attention and MLP. Source: modeling_vaultgemma.",
    layers=partial(_build, qk_norm=False, norms=(NORMS[0], None, NORMS[2], None)),
    leave=(),
)


def _gemma3_ropes(config: Config) -> Config:
    full_rope_config, local_rope = split_ropes(
        config,
        read_int(config, "head_dim", 256),
        131072,
        theta=1e6,
        local_theta=config.get("rope_local_base_freq", 1e4),
    )
    return {**Gemma2.prepare(full_rope_config), "local_rope": local_rope}


def _gemma3(config: Config) -> dict[str, Any]:
    pattern = read_int(config, "sliding_window_pattern", 6)
    return {"parts": {**_read_layers(config, pattern, 0.0), "local_rope": config["local_rope"]}}


Gemma3 = replace(
    Gemma2,
    about="Gemma 3 and FunctionGemma: q and k norms; five local layers for each global one."
    " Source: transformers modeling_gemma3.",
    positions=131072,
    layers=partial(_build, qk_norm=True),
    leave=(),
    prepare=_gemma3_ropes,
    read_arguments=_gemma3,
)


def _embedding_keys(config: Config) -> Config:
    both_sides = read_bool(config, "use_bidirectional_attention", False)
    if not read_bool(config, "is_causal", True):  # transformers has other windows with it
        refuse("is_causal", False, "absent: use_bidirectional_attention says the same")
    config = {**config, "use_bidirectional_attention": False, "both_sides": both_sides}
    if both_sides and config.get("sliding_window", 1) is not None:
        # The window of the config counts the tokens on both sides together.
        config["sliding_window"] = read_int(config, "sliding_window", 4096) // 2 + 1
    return _gemma3_ropes(config)


def _embedding(spec: ModelSpec, config: Config) -> ModelSpec:
    both_sides = config["both_sides"]
    return replace(_scaled(spec, config), encoder=both_sides, pooled=both_sides)


Gemma3Embedding = replace(
    Gemma3,
    about="EmbeddingGemma: Gemma 3 without a causal mask. Source: modeling_gemma3.",
    leave=tuple(f"{name}.weight" for name in DENSE),
    prepare=_embedding_keys,
    finish=_embedding,
)
