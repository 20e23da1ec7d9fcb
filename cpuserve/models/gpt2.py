"""GPT-2, and GPT-BigCode (StarCoder 1, SantaCoder), which has one KV head.

Positions are learned. GPT-2 stores matrices as [in, out], and GPT-BigCode as [out, in].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from cpuserve.models.config import (
    read_bool,
    read_choice,
    read_dtype,
    read_float,
    read_ids,
    read_int,
    refuse,
)
from cpuserve.models.opt import ACTIVATIONS
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import Then, ValueId
from cpuserve.program.parts import columns


class Gpt2:
    """GPT-2 and DistilGPT2: learned positions, layer norms. Source: transformers modeling_gpt2.

    Keys of spec.parts: "by_layer" (scale_attn_by_inverse_layer_idx) and "transposed".
    transposed: whether the checkpoint stores matrices as [in, out], as published ones do.
    Checkpoints with conv1d_transposed in their config store [out, in]. Only cpuserve has this key,
    for GGUF files and quantized copies.
    """

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a GPT-2 config."""
        vocab = read_int(config, "vocab_size")
        width = read_int(config, "n_embd", high=1 << 20)
        heads = read_int(config, "n_head", high=65536)
        if width % heads:
            refuse("n_embd", width, f"a multiple of n_head ({heads})")
        if read_bool(config, "add_cross_attention", False):
            refuse("add_cross_attention", True, "false: only decoders alone are supported")
        return ModelSpec(
            vocab=vocab,
            width=width,
            layers=read_int(config, "n_layer", high=4096),
            q_heads=heads,
            kv_heads=heads,
            head_dim=width // heads,
            intermediate=read_int(config, "n_inner", 4 * width, high=1 << 24),
            max_position=read_int(config, "n_positions", 1024),
            norm_eps=read_float(config, "layer_norm_epsilon", 1e-5),
            tied=read_bool(config, "tie_word_embeddings", True),
            dtype=read_dtype(config),
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            activation=read_choice(config, "activation_function", "gelu_new", ACTIVATIONS),
            attention_scale=None if read_bool(config, "scale_attn_weights", True) else 1.0,
            bos_ids=read_ids(config, "bos_token_id", vocab),
            eos_ids=read_ids(config, "eos_token_id", vocab),
            parts={
                "by_layer": read_bool(config, "scale_attn_by_inverse_layer_idx", False),
                "transposed": not read_bool(config, "conv1d_transposed", False),
            },
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        x = b.embed("transformer.wte")
        b.position_embed(x, "transformer.wpe", rows=s.max_position)
        for i in range(s.layers):
            at = f"transformer.h.{i}"
            _attention(b, s, i, b.layer_norm(x, f"{at}.ln_1"), x)
            h = b.layer_norm(x, f"{at}.ln_2")
            wide = _matrix(s, f"{at}.mlp.c_fc", s.intermediate)
            then = cast("Then", s.activation)
            g = b.linear(h, wide, features=s.intermediate, bias=True, then=then)
            b.linear(g, _matrix(s, f"{at}.mlp.c_proj", s.width), bias=True, add_to=x, use="down")
        h = b.layer_norm(x, "transformer.ln_f")
        b.logits(h, "lm_head", tied_to="transformer.wte" if s.tied else None)


def _attention(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's attention of h to x."""
    at = f"transformer.h.{layer}.attn"
    features = (s.q_heads + 2 * s.kv_heads) * s.head_dim
    qkv = b.linear(h, _matrix(s, f"{at}.c_attn", features), features=features, bias=True)
    b.rope_store_kv(qkv, layer=layer, rope=None)
    scale = s.head_dim**-0.5 if s.attention_scale is None else s.attention_scale
    a = b.attention(qkv, layer=layer, scale=scale / (layer + 1 if s.parts["by_layer"] else 1))
    b.linear(a, _matrix(s, f"{at}.c_proj", s.width), bias=True, add_to=x, use="down")


def _matrix(s: ModelSpec, name: str, features: int) -> str:
    """Return the name that a Program has for matrix `name`, which has `features` outputs."""
    return columns(name, 0, features) if s.parts["transposed"] else name


class GptBigCode:
    """StarCoder 1 and SantaCoder. Source: transformers modeling_gpt_bigcode."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a GPT-BigCode config."""
        if not read_bool(config, "multi_query", True):
            refuse("multi_query", False, "true: a KV head for each query head is not supported")
        usual = {"activation_function": "gelu_pytorch_tanh", **config}
        return replace(Gpt2.spec({**usual, "conv1d_transposed": True}), kv_heads=1)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        Gpt2.build(b, s)
