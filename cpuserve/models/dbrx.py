"""DBRX: fused and limited queries, keys and values, and experts instead of MLPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.models.config import read_bool, read_int, read_object, refuse
from cpuserve.models.decoder_row import without_nulls
from cpuserve.models.experts import add_mixture, read_experts
from cpuserve.models.llama import clip_values, finish_decoder, read_clip, read_decoder
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import BuiltTensors, StoredNames
from cpuserve.program.builder import Builder

WORDS = "transformer.wte"
PARTS = ("gate_proj", "up_proj", "down_proj")
# The matrices of all experts in published files, with the part of an expert that each has.
FLAT = dict(zip(("w1", "v1", "w2"), PARTS, strict=True))
EXPERTS = "moe_num_experts"


class Dbrx:
    """DBRX 132B. Source: transformers modeling_dbrx."""

    stored = StoredNames(published={r"(\.experts\.mlp\.(?:w[12]|v1))$": r"\1.weight"})

    @staticmethod
    def built(config: Mapping[str, Any]) -> BuiltTensors:
        """Return what divides the flat matrices of the experts."""
        ffn = read_object(config, "ffn_config")
        experts = read_int(ffn, EXPERTS, 4, high=4096)
        return BuiltTensors("cpuserve.quant.flat_experts:FlatExperts", (experts, FLAT))

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a DBRX config."""
        attention, ffn = read_object(config, "attn_config"), read_object(config, "ffn_config")
        norm = ffn.get("moe_normalize_expert_weights", 1.0)
        if norm not in (None, 1):
            refuse("ffn_config.moe_normalize_expert_weights", norm, "1 or null")
        if (name := read_object(ffn, "ffn_act_fn").get("name", "silu")) != "silu":
            refuse("ffn_config.ffn_act_fn", name, "silu")
        if read_bool(config, "tie_word_embeddings", False):
            refuse("tie_word_embeddings", True, "false: DBRX has an output matrix of its own")
        width = read_int(ffn, "ffn_hidden_size", 3584, high=1 << 24)
        sizes = {"num_experts_per_tok": read_int(ffn, "moe_top_k", 1), "width": width}
        sizes[EXPERTS] = read_int(ffn, EXPERTS, 4, high=4096)
        parts = read_experts(sizes, count=EXPERTS, width="width")
        parts |= {"renormalize": norm is not None, "clip": read_clip(attention)}
        given = without_nulls(config)
        if (theta := attention.get("rope_theta")) is not None:  # published configs have it here
            given = {"rope_theta": theta, **given}
        return read_decoder(
            {
                "layer_norm_epsilon": 1e-5,
                **given,
                "hidden_size": read_int(config, "d_model", high=1 << 20),
                "intermediate_size": width,
                "num_attention_heads": read_int(config, "n_heads", high=65536),
                "num_key_value_heads": read_int(attention, "kv_n_heads", 1, high=65536),
                "num_hidden_layers": read_int(config, "n_layers", high=4096),
                "max_position_embeddings": read_int(config, "max_seq_len", 2048),
                "head_dim": None,
                "hidden_act": "silu",
            },
            positions=2048,
            eps="layer_norm_epsilon",
            parts=parts,
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        x, features = b.embed(WORDS), (s.q_heads + 2 * s.kv_heads) * s.head_dim
        for i in range(s.layers):
            at = f"transformer.blocks.{i}"
            h = b.layer_norm(x, f"{at}.norm_attn_norm.norm_1", bias=False)
            qkv = b.linear(h, f"{at}.norm_attn_norm.attn.Wqkv", features=features)
            clip_values(b, s, qkv)
            b.rope_store_kv(qkv, layer=i, rope=s.rope)
            a = b.attention(qkv, layer=i)
            b.linear(a, f"{at}.norm_attn_norm.attn.out_proj", add_to=x)
            h = b.layer_norm(x, f"{at}.norm_attn_norm.norm_2", bias=False)
            add_mixture(
                b,
                s,
                f"{at}.ffn",
                h,
                x,
                parts=PARTS,
                router="router.layer",
                renormalize=s.parts["renormalize"],
            )
        h = b.layer_norm(x, "transformer.norm_f", bias=False)
        finish_decoder(b, s, h, embedding=WORDS)
