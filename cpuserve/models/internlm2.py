"""InternLM 2: Llama, with queries, keys and values by groups of heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.models.config import read_bool
from cpuserve.models.llama import finish_decoder, layer_rope, read_decoder
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId
from cpuserve.program.parts import rows


class InternLm2:
    """InternLM 2 and 2.5. Source: modeling_internlm2 of the published checkpoints."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in an InternLM 2 config."""
        bias = read_bool(config, "bias", True)
        return read_decoder(config, positions=2048, qkv_bias=bias, out_bias=bias)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        x = b.embed("model.tok_embeddings")
        for layer in range(s.layers):
            at = f"model.layers.{layer}"
            _attention(b, s, layer, b.rms_norm(x, f"{at}.attention_norm"), x)
            h = b.rms_norm(x, f"{at}.ffn_norm")
            both = [f"{at}.feed_forward.w1", f"{at}.feed_forward.w3"]
            g = b.linear(h, both, features=s.intermediate, then="silu_mul")
            b.linear(g, f"{at}.feed_forward.w2", add_to=x, use="down")
        h = b.rms_norm(x, "model.norm")
        if s.tied:
            finish_decoder(b, s, h, embedding="model.tok_embeddings")
        else:
            b.logits(h, "output")


def _attention(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add attention of h to x.

    The matrix has, for each head of keys, its heads of queries, its keys and its values.
    """
    at, d = f"model.layers.{layer}.attention", s.head_dim
    queries = s.q_heads // s.kv_heads
    parts = {}
    for first, count in ((0, queries), (queries, 1), (queries + 1, 1)):
        for group in range(s.kv_heads):
            begin = (group * (queries + 2) + first) * d
            parts[rows(f"{at}.wqkv", begin, count * d)] = count * d
    qkv = b.linear(h, list(parts), features=list(parts.values()), bias=s.qkv_bias)
    b.rope_store_kv(qkv, layer=layer, rope=layer_rope(s, layer))
    b.linear(b.attention(qkv, layer=layer), f"{at}.wo", bias=s.out_bias, add_to=x)
