"""EXAONE 3.0, 3.5 and Deep: Llama with tensors in the style of GPT-2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.models.decoders import Llama
from cpuserve.models.llama import finish_decoder
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import StoredNames
from cpuserve.program.builder import Builder

# Keys of transformers, each with the key of published configs.
_KEYS = {
    "num_hidden_layers": "num_layers",
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
}


class Exaone:
    """EXAONE 3.0, 3.5 and Deep: Llama with tensors in the style of GPT-2.

    Source: transformers configuration_exaone and conversion_mapping, which make it a Llama.
    """

    stored = StoredNames(
        {
            r"^model\.embed_tokens\.": "transformer.wte.",
            r"^model\.norm\.": "transformer.ln_f.",
            r"^model\.layers\.": "transformer.h.",
            r"\.self_attn\.o_proj\.": ".attn.attention.out_proj.",
            r"\.self_attn\.": ".attn.attention.",
            r"\.input_layernorm\.": ".ln_1.",
            r"\.post_attention_layernorm\.": ".ln_2.",
            r"\.mlp\.gate_proj\.": ".mlp.c_fc_0.",
            r"\.mlp\.up_proj\.": ".mlp.c_fc_1.",
            r"\.mlp\.down_proj\.": ".mlp.c_proj.",
        }
    )

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in an EXAONE config, in both spellings."""
        given = {key: value for key, value in config.items() if value is not None}
        older = {key: given[name] for key, name in _KEYS.items() if name in given}
        defaults = {
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "max_position_embeddings": 4096,
            "eos_token_id": 361,
        }
        return Llama.spec({**defaults, **older, **given})

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        x = b.embed("transformer.wte")
        sizes = (s.q_heads * s.head_dim, *(s.kv_heads * s.head_dim,) * 2)
        for i in range(s.layers):
            layer = f"transformer.h.{i}"
            at = f"{layer}.attn.attention"
            h = b.rms_norm(x, f"{layer}.ln_1")
            parts = [f"{at}.{part}_proj" for part in "qkv"]
            qkv = b.linear(h, parts, features=list(sizes), bias=s.qkv_bias, use="qkv")
            b.rope_store_kv(qkv, layer=i, rope=s.rope)
            b.linear(b.attention(qkv, layer=i), f"{at}.out_proj", bias=s.out_bias, add_to=x)
            h = b.rms_norm(x, f"{layer}.ln_2")
            both = [f"{layer}.mlp.c_fc_{part}" for part in range(2)]
            then = s.gated_activation
            g = b.linear(h, both, features=s.intermediate, bias=s.mlp_bias, then=then)
            b.linear(g, f"{layer}.mlp.c_proj", bias=s.mlp_bias, add_to=x, use="down")
        finish_decoder(b, s, b.rms_norm(x, "transformer.ln_f"), embedding="transformer.wte")
