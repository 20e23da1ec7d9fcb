"""MPT: ALiBi instead of positions, and no biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cpuserve.models.config import read_bool, read_float, read_int, read_object, refuse
from cpuserve.models.llama import clip_values, read_clip, read_decoder
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder

WORDS = "transformer.wte"


class Mpt:
    """MPT 7B and 30B. Source: transformers modeling_mpt."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in an MPT config."""
        attention = read_object(config, "attn_config")
        # transformers reads neither key: all of its models have ALiBi, and no norms of q and k.
        if not read_bool(attention, "alibi", True) or read_bool(attention, "qk_ln", False):
            refuse("attn_config", attention, "with alibi and without qk_ln")
        if (most := read_int(attention, "alibi_bias_max", 8)) != 8:
            refuse("attn_config.alibi_bias_max", most, "8")
        width = read_int(config, "d_model", high=1 << 20)
        tied = config.get("tie_word_embeddings")
        spec = read_decoder(
            {
                "layer_norm_epsilon": 1e-5,
                **config,
                "hidden_size": width,
                "intermediate_size": 4 * width,  # transformers does not read expansion_ratio
                "num_attention_heads": read_int(config, "n_heads", high=65536),
                "num_key_value_heads": None,
                "num_hidden_layers": read_int(config, "n_layers", high=4096),
                "max_position_embeddings": read_int(config, "max_seq_len", 2048),
                "head_dim": None,
                "hidden_act": "silu",
                "tie_word_embeddings": True if tied is None else tied,
            },
            positions=2048,
            eps="layer_norm_epsilon",
            parts={"clip": read_clip(attention)},
        )
        scale = attention.get("softmax_scale")
        scale = None if scale is None else read_float(attention, "softmax_scale")
        return replace(spec, rope=None, attention_scale=scale)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        x, features = b.embed(WORDS), (s.q_heads + 2 * s.kv_heads) * s.head_dim
        for i in range(s.layers):
            at = f"transformer.blocks.{i}"
            h = b.layer_norm(x, f"{at}.norm_1", bias=False)
            qkv = b.linear(h, f"{at}.attn.Wqkv", features=features)
            clip_values(b, s, qkv)
            b.rope_store_kv(qkv, layer=i, rope=None)
            a = b.attention(qkv, layer=i, scale=s.attention_scale, alibi=True)
            b.linear(a, f"{at}.attn.out_proj", add_to=x)
            h = b.layer_norm(x, f"{at}.norm_2", bias=False)
            g = b.linear(h, f"{at}.ffn.up_proj", features=s.intermediate, then="gelu")
            b.linear(g, f"{at}.ffn.down_proj", add_to=x, use="down")
        h = b.layer_norm(x, "transformer.norm_f", bias=False)
        b.logits(h, "lm_head", tied_to=WORDS if s.tied else None)
