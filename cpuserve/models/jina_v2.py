"""jina-embeddings v2: BERT without positions, with linear biases (ALiBi) and gated MLPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from cpuserve.models.bert import POOLER, TYPES, WORDS, leave_linears, read_encoder_heads
from cpuserve.models.config import read_choice, read_dtype, read_float, read_int
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import Then
from cpuserve.program.parts import rows

_HEAD = ("transform.dense", "transform.LayerNorm", "decoder")  # of masked tokens


class JinaV2:
    """jina-embeddings v2, small and base. Source: modeling_bert of jina-bert-implementation."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a jina-embeddings v2 config."""
        read_choice(config, "position_embedding_type", "alibi", {"alibi": "alibi"})
        gates = {"geglu": "gelu_mul"}
        width, heads = read_encoder_heads(config)
        return ModelSpec(
            vocab=read_int(config, "vocab_size"),
            width=width,
            layers=read_int(config, "num_hidden_layers", high=4096),
            q_heads=heads,
            kv_heads=heads,
            head_dim=width // heads,
            intermediate=read_int(config, "intermediate_size", 4 * width, high=1 << 24),
            max_position=read_int(config, "max_position_embeddings", 8192),
            norm_eps=read_float(config, "layer_norm_eps", 1e-12),
            tied=True,
            dtype=read_dtype(config),
            activation=read_choice(config, "feed_forward_type", "geglu", gates),
            pooled=True,
            encoder=True,
            extra={"types": read_int(config, "type_vocab_size", 2, high=1 << 16)},
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        x = b.embed(WORDS)
        types = TYPES, cast("int", s.extra["types"])
        b.position_embed(x, None, rows=s.max_position, types=types)
        x = b.layer_norm(x, "embeddings.LayerNorm")
        for i in range(s.layers):
            at = f"encoder.layer.{i}"
            names = [f"{at}.attention.self.{part}" for part in ("query", "key", "value")]
            qkv = b.linear(x, names, features=s.width, bias=True)
            a = b.attend_both_sides(qkv, alibi=True)
            b.linear(a, f"{at}.attention.output.dense", bias=True, add_to=x)
            x = b.layer_norm(x, f"{at}.attention.output.LayerNorm")
            both = [
                rows(f"{at}.mlp.gated_layers", i * s.intermediate, s.intermediate) for i in range(2)
            ]
            g = b.linear(x, both, features=s.intermediate, then=cast("Then", s.activation))
            b.linear(g, f"{at}.mlp.wo", bias=True, add_to=x)
            x = b.layer_norm(x, f"{at}.mlp.layernorm")
        leave_linears(b, POOLER, "cls.predictions", *(f"cls.predictions.{n}" for n in _HEAD))
        b.hidden(x)
