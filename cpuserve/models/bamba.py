"""Bamba: Mamba2 and attention, with a gated MLP in each layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.models.config import read_bool, read_int, refuse
from cpuserve.models.llama import finish_decoder, gated_mlp, read_decoder, self_attention
from cpuserve.models.mamba import add_mamba2, read_mamba2
from cpuserve.models.parts import SpecParts
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder


class Bamba:
    """Bamba 9B. Source: transformers modeling_bamba."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Bamba config; usually half of a head is rotated."""
        layers = read_int(config, "num_hidden_layers", high=4096)
        listed = config.get("attn_layer_indices") or []
        if not isinstance(listed, list) or not all(type(i) is int for i in listed):
            refuse("attn_layer_indices", listed, "a list of layer numbers")
        parts: SpecParts = {"attends": tuple(i in listed for i in range(layers))}
        parts["mamba2"] = read_mamba2({"rms_norm_eps": 1e-5, **config})
        bias = read_bool(config, "attention_bias", False)
        return read_decoder(
            {
                "rms_norm_eps": 1e-5,
                "num_key_value_heads": 8,
                **config,
                "partial_rotary_factor": 0.5,  # rope_parameters may have another one
            },
            positions=262144,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=read_bool(config, "mlp_bias", False),
            parts=parts,
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        attends = s.parts["attends"]
        sizes = s.parts["mamba2"]
        x = b.embed("model.embed_tokens")
        for i in range(s.layers):
            at = f"model.layers.{i}"
            h = b.rms_norm(x, f"{at}.input_layernorm")
            if attends[i]:
                self_attention(b, s, i, h, x, cache=sum(attends[:i]))
            else:
                add_mamba2(b, sizes, f"{at}.mamba", h, x)
            h = b.rms_norm(x, f"{at}.pre_ff_layernorm")
            gated_mlp(b, s, f"{at}.feed_forward", h, s.intermediate, to=x)
        finish_decoder(b, s, b.rms_norm(x, "model.final_layernorm"))
