"""CTRL: scaled embeddings, places that are not learned, and a head with a bias."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cpuserve.models.config import read_int, refuse
from cpuserve.models.gpt2 import Gpt2
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder

WORDS = "transformer.w"


class Ctrl:
    """CTRL. Source: transformers modeling_ctrl."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a CTRL config; the epsilon of norms in layers is fixed."""
        usual = {"n_positions": 256, **{k: v for k, v in config.items() if v is not None}}
        fixed = {"scale_attn_weights": None, "scale_attn_by_inverse_layer_idx": None}
        own = {"n_inner": read_int(config, "dff", high=1 << 24), "activation_function": "relu"}
        spec = Gpt2.spec({"layer_norm_epsilon": 1e-6, **usual, **fixed, **own})
        if spec.width % 2:
            refuse("n_embd", spec.width, "even: half of the columns of a place are sines")
        return replace(spec, embed_scale=spec.width**0.5)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        x = b.embed(WORDS, scale=s.embed_scale)
        b.position_embed(x, None, rows=s.max_position, span=s.width // 2)
        for i in range(s.layers):
            at = f"transformer.h.{i}"
            h = b.layer_norm(x, f"{at}.layernorm1", eps=1e-6)
            names = [f"{at}.multi_head_attention.W{n}" for n in "qkv"]
            qkv = b.linear(h, names, features=s.width, bias=True)
            b.rope_store_kv(qkv, layer=i, rope=None)
            a = b.attention(qkv, layer=i)
            b.linear(a, f"{at}.multi_head_attention.dense", bias=True, add_to=x, use="output")
            h = b.layer_norm(x, f"{at}.layernorm2", eps=1e-6)
            g = b.linear(h, f"{at}.ffn.0", features=s.intermediate, bias=True, then="relu")
            b.linear(g, f"{at}.ffn.2", bias=True, add_to=x)
        h = b.layer_norm(x, "transformer.layernorm")
        b.logits(h, "lm_head", tied_to=WORDS if s.tied else None, bias=True)
