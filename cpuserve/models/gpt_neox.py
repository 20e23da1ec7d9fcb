"""GPT-NeoX and Pythia: layer norms, plain MLPs, and q, k and v of a head side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from cpuserve.models.base import register_model
from cpuserve.models.config import read_bool, read_choice
from cpuserve.models.llama import read_decoder
from cpuserve.models.opt import ACTIVATIONS
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import Then, ValueId
from cpuserve.program.parts import rows


@register_model("GPTNeoXForCausalLM")
class GptNeoX:
    """GPT-NeoX and Pythia: layer norms; attention and MLP may read the same rows.

    Source: transformers modeling_gpt_neox.
    """

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """The hyperparameters in a GPT-NeoX config."""
        activation = read_choice(config, "hidden_act", "gelu", ACTIVATIONS)
        bias = read_bool(config, "attention_bias", True)
        own = {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
        rope = {new: config[old] for old, new in own.items() if config.get(old) is not None}
        return read_decoder(
            {
                "partial_rotary_factor": 0.25,
                "layer_norm_eps": 1e-5,
                **config,
                **rope,
                "hidden_act": "silu",
            },
            architecture="GPTNeoXForCausalLM",
            positions=2048,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=True,
            extra={
                "activation": activation,
                "parallel": read_bool(config, "use_parallel_residual", True),
            },
            eps="layer_norm_eps",
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the ops of the model to `b`."""
        x = b.embed("gpt_neox.embed_in")
        for i in range(s.layers):
            at = f"gpt_neox.layers.{i}"
            h = b.layer_norm(x, f"{at}.input_layernorm")
            if s.extra["parallel"]:
                mlp = b.layer_norm(x, f"{at}.post_attention_layernorm")
                _attention(b, s, i, h, x)
            else:
                _attention(b, s, i, h, x)
                mlp = b.layer_norm(x, f"{at}.post_attention_layernorm")
            then = cast("Then", s.extra["activation"])
            wide = f"{at}.mlp.dense_h_to_4h"
            g = b.linear(mlp, wide, features=s.intermediate, bias=True, then=then)
            b.linear(g, f"{at}.mlp.dense_4h_to_h", bias=True, add_to=x)
        h = b.layer_norm(x, "gpt_neox.final_layer_norm")
        b.logits(h, "embed_out", tied_to="gpt_neox.embed_in" if s.tied else None)


def _attention(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's attention of h to x. The tensor has q, k and v of one head after another."""
    at, d = f"gpt_neox.layers.{layer}.attention", s.head_dim
    firsts = [(3 * head + part) * d for part in range(3) for head in range(s.q_heads)]
    parts = [rows(f"{at}.query_key_value", first, d) for first in firsts]
    qkv = b.linear(h, parts, features=d, bias=s.qkv_bias)
    b.rope_store_kv(qkv, layer=layer, rope=s.rope)
    b.linear(b.attention(qkv, layer=layer), f"{at}.dense", bias=s.out_bias, add_to=x)
