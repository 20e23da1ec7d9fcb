"""Gemma 1, 2, 3 and VaultGemma (text): embeddings are scaled, and norms have weights of 1 + w."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from cpuserve.models.base import DECODER_HEAD
from cpuserve.models.config import read_bool, read_float, read_int, read_windows, refuse
from cpuserve.models.llama import (
    SandwichNorms,
    attend,
    build_decoder,
    build_sandwich,
    offset_norm,
    read_decoder,
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


class Gemma:
    """Gemma 1: Llama with scaled embeddings and a gate of GELU. Source: modeling_gemma."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Gemma 1 config.

        The first configs have "gelu", but the models were trained with its approximation.
        """
        if config.get("use_bidirectional_attention"):
            refuse("use_bidirectional_attention", True, "false: only causal attention is supported")
        act = config.get("hidden_activation") or config.get("hidden_act") or "gelu_pytorch_tanh"
        tied = config.get("tie_word_embeddings")
        bias = read_bool(config, "attention_bias", False)
        spec = read_decoder(
            {
                **config,
                "head_dim": read_int(config, "head_dim", 256),
                "hidden_act": "gelu_pytorch_tanh" if act == "gelu" else act,
                "tie_word_embeddings": True if tied is None else tied,
            },
            positions=8192,
            qkv_bias=bias,
            out_bias=bias,
        )
        return replace(spec, embed_scale=embed_scale(spec.width, spec.dtype))

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        build_decoder(b, s, norm=offset_norm)


class Gemma2:
    """Gemma 2: soft caps, and every second layer local. Source: transformers modeling_gemma2."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Gemma 2 config."""
        caps: SpecParts = {"softcap": read_cap(config, "attn_logit_softcapping", 50.0)}
        return _spec(config, 8192, pattern=2, logit_cap=30.0, parts=caps)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        b.leave(DECODER_HEAD)
        _build(b, s, qk_norm=False)


class VaultGemma:
    """Gemma 2 without the norms after attention and MLP. Source: modeling_vaultgemma."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a VaultGemma config."""
        return Gemma2.spec(config)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        _build(b, s, qk_norm=False, norms=(NORMS[0], None, NORMS[2], None))


class Gemma3:
    """Gemma 3 and FunctionGemma: q and k norms; five local layers for each global one.

    Source: transformers modeling_gemma3.
    """

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Gemma 3 text config."""
        config, local_rope = split_ropes(
            config,
            read_int(config, "head_dim", 256),
            131072,
            theta=1e6,
            local_theta=config.get("rope_local_base_freq", 1e4),
        )
        return _spec(
            config,
            131072,
            pattern=read_int(config, "sliding_window_pattern", 6),
            logit_cap=0.0,
            parts={"local_rope": local_rope},
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        _build(b, s, qk_norm=True)


class Gemma3Embedding:
    """EmbeddingGemma: Gemma 3 without a causal mask. Source: modeling_gemma3."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Gemma 3 text config."""
        both_sides = read_bool(config, "use_bidirectional_attention", False)
        if not read_bool(config, "is_causal", True):  # transformers has other windows with it
            refuse("is_causal", False, "absent: use_bidirectional_attention says the same")
        config = {**config, "use_bidirectional_attention": False}
        if both_sides and config.get("sliding_window", 1) is not None:
            # The window of the config counts the tokens on both sides together.
            config["sliding_window"] = read_int(config, "sliding_window", 4096) // 2 + 1
        spec = Gemma3.spec(config)
        return replace(spec, encoder=both_sides, pooled=both_sides)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        b.leave(f"{name}.weight" for name in DENSE)
        Gemma3.build(b, s)


def _spec(
    config: Mapping[str, Any],
    positions: int,
    *,
    pattern: int,
    logit_cap: float,
    parts: SpecParts,
) -> ModelSpec:
    """Return the hyperparameters of Gemma 2 or 3.

    pattern: every pattern-th layer is global if the config has no layer_types.
    """
    if config.get("use_bidirectional_attention"):
        refuse("use_bidirectional_attention", True, "false: only causal attention is supported")
    window = (
        0
        if config.get("sliding_window", 1) is None
        else read_int(config, "sliding_window", 4096, low=0)
    )
    tied = config.get("tie_word_embeddings")
    bias = read_bool(config, "attention_bias", False)
    spec = read_decoder(
        {
            **config,
            "head_dim": read_int(config, "head_dim", 256),
            "hidden_act": config.get("hidden_activation") or "gelu_pytorch_tanh",
            "tie_word_embeddings": True if tied is None else tied,
        },
        positions=positions,
        qkv_bias=bias,
        out_bias=bias,
        parts={
            "windows": read_windows(config, window, default=lambda i: (i + 1) % pattern > 0),
            "logit_softcap": read_cap(config, "final_logit_softcapping", logit_cap),
            **parts,
        },
    )
    return replace(
        spec,
        embed_scale=embed_scale(spec.width, spec.dtype),
        attention_scale=read_float(config, "query_pre_attn_scalar", 256.0) ** -0.5,
    )


def read_cap(config: Mapping[str, Any], key: str, default: float) -> float:
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
