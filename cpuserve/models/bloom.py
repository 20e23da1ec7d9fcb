"""BLOOM and BLOOMZ: ALiBi instead of positions, and a norm of the embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cpuserve.models.config import read_bool, read_int, refuse
from cpuserve.models.gpt_neox import grouped_attention, plain_mlp
from cpuserve.models.llama import read_decoder
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder

WORDS = "transformer.word_embeddings"


class Bloom:
    """BLOOM 560M to 176B. Source: transformers modeling_bloom."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a BLOOM config.

        No position limits its length, and configs do not always have the length of its training.
        """
        if read_bool(config, "apply_residual_connection_post_layernorm", False):
            key = "apply_residual_connection_post_layernorm"
            refuse(key, True, "false: norms are added to nothing else")
        old = "n_embed" if config.get("n_embed") is not None else "hidden_size"
        width = read_int(config, old, high=1 << 20)
        tied = config.get("tie_word_embeddings")
        heads = "n_head" if config.get("n_head") is not None else "num_attention_heads"
        layers = "n_layer" if config.get("n_layer") is not None else "num_hidden_layers"
        spec = read_decoder(
            {
                "layer_norm_epsilon": 1e-5,
                **config,
                "hidden_size": width,
                "intermediate_size": 4 * width,
                "num_attention_heads": read_int(config, heads, high=65536),
                "num_key_value_heads": None,
                "num_hidden_layers": read_int(config, layers, high=4096),
                "max_position_embeddings": read_int(config, "seq_length", 2048),
                "head_dim": None,  # a key that transformers does not read
                "hidden_act": "silu",
                "tie_word_embeddings": True if tied is None else tied,
            },
            positions=2048,
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            parts={"activation": "gelu_tanh"},
            eps="layer_norm_epsilon",
        )
        return replace(spec, rope=None)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        x = b.layer_norm(b.embed(WORDS), f"{WORDS}_layernorm")
        for i in range(s.layers):
            at = f"transformer.h.{i}"
            h = b.layer_norm(x, f"{at}.input_layernorm")
            grouped_attention(b, s, i, f"{at}.self_attention", h, x, alibi=True)
            plain_mlp(b, s, f"{at}.mlp", b.layer_norm(x, f"{at}.post_attention_layernorm"), x)
        h = b.layer_norm(x, "transformer.ln_f")
        b.logits(h, "lm_head", tied_to=WORDS if s.tied else None)
