"""BioGPT: OPT with a GELU and scaled embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from cpuserve.models.config import read_bool, read_choice
from cpuserve.models.llama import read_decoder
from cpuserve.models.opt import ACTIVATIONS, NORM_EPS, POSITION_OFFSET
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import Then

WORDS, HEAD = "biogpt.embed_tokens", "output_projection"


class BioGpt:
    """BioGPT and BioGPT-Large. Source: transformers modeling_biogpt."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a BioGPT config; the epsilon of norms is fixed."""
        tied = read_bool(config, "tie_word_embeddings", True)
        fixed = {"num_key_value_heads": None, "head_dim": None, "hidden_act": "silu"}
        spec = read_decoder(
            {**config, **fixed, "tie_word_embeddings": tied, "rms_norm_eps": NORM_EPS},
            positions=1024,
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
        )
        scaled = read_bool(config, "scale_embedding", True)
        return replace(
            spec,
            rope=None,
            activation=read_choice(config, "hidden_act", "gelu", ACTIVATIONS),
            embed_scale=spec.width**0.5 if scaled else 1.0,
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        x = b.embed(WORDS, scale=s.embed_scale)
        places = s.max_position + POSITION_OFFSET
        b.position_embed(x, "biogpt.embed_positions", rows=places, offset=POSITION_OFFSET)
        for i in range(s.layers):
            at = f"biogpt.layers.{i}"
            h = b.layer_norm(x, f"{at}.self_attn_layer_norm")
            names = [f"{at}.self_attn.{n}_proj" for n in "qkv"]
            qkv = b.linear(h, names, features=s.width, bias=True)
            b.rope_store_kv(qkv, layer=i, rope=None)
            a = b.attention(qkv, layer=i)
            b.linear(a, f"{at}.self_attn.out_proj", bias=True, add_to=x)
            h, then = b.layer_norm(x, f"{at}.final_layer_norm"), cast("Then", s.activation)
            g = b.linear(h, f"{at}.fc1", features=s.intermediate, bias=True, then=then)
            b.linear(g, f"{at}.fc2", bias=True, add_to=x)
        if s.tied:
            b.leave((f"{HEAD}.weight",))
        b.logits(b.layer_norm(x, "biogpt.layer_norm"), HEAD, tied_to=WORDS if s.tied else None)
