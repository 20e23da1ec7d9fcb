"""Persimmon: GPT-NeoX with layer norms of heads, and squares of ReLUs in its MLPs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.models.activations import ACTIVATIONS
from cpuserve.models.config import read_bool, read_choice
from cpuserve.models.gpt_neox import grouped_attention, plain_mlp
from cpuserve.models.llama import finish_decoder, read_decoder
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder


class Persimmon:
    """Persimmon 8B: each head of q and k has a layer norm. Source: modeling_persimmon."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Persimmon config."""
        share = config.get("partial_rotary_factor")
        activations = {**ACTIVATIONS, "relu2": "relu2"}
        return read_decoder(
            {
                "layer_norm_eps": 1e-5,
                "bos_token_id": 1,
                "eos_token_id": 2,
                **config,
                "partial_rotary_factor": 0.5 if share is None else share,
                "hidden_act": "silu",
                # keys that transformers does not read
                "head_dim": None,
                "num_key_value_heads": None,
            },
            positions=16384,
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            parts={
                "activation": read_choice(config, "hidden_act", "relu2", activations),
                "head_norm": read_bool(config, "qk_layernorm", True),
            },
            eps="layer_norm_eps",
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        x = b.embed("model.embed_tokens")
        for i in range(s.layers):
            at, normed = f"model.layers.{i}", bool(s.parts["head_norm"])
            h = b.layer_norm(x, f"{at}.input_layernorm")
            grouped_attention(b, s, i, f"{at}.self_attn", h, x, head_norm=normed)
            plain_mlp(b, s, f"{at}.mlp", b.layer_norm(x, f"{at}.post_attention_layernorm"), x)
        finish_decoder(b, s, b.layer_norm(x, "model.final_layernorm"))
