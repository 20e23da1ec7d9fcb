"""Falcon: one matrix has q, k and v of each KV group; attention runs parallel to the MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.models.activations import ACTIVATIONS
from cpuserve.models.config import read_bool, read_choice, read_int, refuse
from cpuserve.models.gpt_neox import grouped_attention, plain_mlp
from cpuserve.models.llama import read_decoder
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder

# Keys of transformers, each with the key of the first published configs.
_FIRST = {
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "num_kv_heads": "n_head_kv",
}


class Falcon:
    """Falcon with RoPE: 7B has one KV head, 40B and 180B a norm for attention and one for the MLP.

    Source: transformers modeling_falcon.
    Keys of spec.parts: "two_norms", and "parallel": whether attention and MLP read the same x.
    """

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a config of Falcon or RefinedWeb, its first spelling.

        In that one, only models with the new architecture have n_head_kv.
        """
        first = {new: config[old] for new, old in _FIRST.items() if config.get(old) is not None}
        config = {**first, "new_decoder_architecture": "num_kv_heads" in first, **config}
        if read_bool(config, "alibi", False):
            refuse("alibi", True, "false: only Falcon models with RoPE are supported")
        width = read_int(config, "hidden_size", high=1 << 20)
        heads = read_int(config, "num_attention_heads", high=65536)
        grouped = read_bool(config, "new_decoder_architecture", False)
        if grouped:
            kv_heads = read_int(config, "num_kv_heads", heads, high=65536)
        else:
            kv_heads = 1 if read_bool(config, "multi_query", True) else heads
        bias = read_bool(config, "bias", False)
        tied = config.get("tie_word_embeddings")
        norms = read_int(config, "num_ln_in_parallel_attn", 2 if grouped else 1)
        return read_decoder(
            {
                "layer_norm_epsilon": 1e-5,
                **config,
                "hidden_act": "silu",
                "num_key_value_heads": kv_heads,
                "intermediate_size": read_int(config, "ffn_hidden_size", 4 * width, high=1 << 24),
                "tie_word_embeddings": True if tied is None else tied,
            },
            positions=2048,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=bias,
            parts={
                "activation": read_choice(config, "activation", "gelu", ACTIVATIONS),
                "two_norms": grouped and norms == 2,
                "parallel": grouped or read_bool(config, "parallel_attn", True),
            },
            eps="layer_norm_epsilon",
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        x = b.embed("transformer.word_embeddings")
        for i in range(s.layers):
            at = f"transformer.h.{i}"
            if s.parts["two_norms"]:
                h, mlp = b.layer_norm(x, f"{at}.ln_attn"), b.layer_norm(x, f"{at}.ln_mlp")
            else:
                h = mlp = b.layer_norm(x, f"{at}.input_layernorm")
            grouped_attention(b, s, i, f"{at}.self_attention", h, x)
            if not s.parts["parallel"]:
                mlp = b.layer_norm(x, f"{at}.post_attention_layernorm")
            plain_mlp(b, s, f"{at}.mlp", mlp, x)
        h = b.layer_norm(x, "transformer.ln_f")
        b.logits(h, "lm_head", tied_to="transformer.word_embeddings" if s.tied else None)
