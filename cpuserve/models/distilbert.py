"""DistilBERT: BERT with half of the layers, without token types, and with other names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.models.activations import ACTIVATIONS
from cpuserve.models.bert import (
    WORDS,
    LayerNames,
    MaskedHead,
    encoder_layer,
    leave_linears,
    word_weights,
)
from cpuserve.models.config import read_bool, read_choice, read_dtype, read_int, refuse
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder

HEAD = MaskedHead("vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector")
LAYER = LayerNames(
    ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    "attention.out_lin",
    "sa_layer_norm",
    "ffn.lin1",
    "ffn.lin2",
    "output_layer_norm",
)


class DistilBert:
    """DistilBERT (SPLADE, msmarco-distilbert). Source: transformers modeling_distilbert."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a DistilBERT config."""
        width = read_int(config, "dim", 768, high=1 << 20)
        heads = read_int(config, "n_heads", 12, high=65536)
        if width % heads:
            refuse("dim", width, f"a multiple of n_heads ({heads})")
        return ModelSpec(
            vocab=read_int(config, "vocab_size", 30522),
            width=width,
            layers=read_int(config, "n_layers", 6, high=4096),
            q_heads=heads,
            kv_heads=heads,
            head_dim=width // heads,
            intermediate=read_int(config, "hidden_dim", 4 * width, high=1 << 24),
            max_position=read_int(config, "max_position_embeddings", 512),
            norm_eps=1e-12,
            tied=read_bool(config, "tie_word_embeddings", True),
            dtype=read_dtype(config),
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            activation=read_choice(config, "activation", "gelu", ACTIVATIONS),
            pooled=True,
            encoder=True,
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        x = b.embed(WORDS)
        b.position_embed(x, "embeddings.position_embeddings", rows=s.max_position)
        x = b.layer_norm(x, "embeddings.LayerNorm")
        for i in range(s.layers):
            x = encoder_layer(b, s, f"transformer.layer.{i}", x, LAYER)
        leave_linears(b, "pre_classifier", "classifier")
        b.hidden(word_weights(b, s, x, HEAD, s.activation))
