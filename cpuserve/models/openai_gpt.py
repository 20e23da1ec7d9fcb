"""OpenAI GPT (GPT-1): the matrices of GPT-2, with norms after attention and MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from cpuserve.models.gpt2 import Gpt2
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import StoredNames
from cpuserve.program.builder import Builder
from cpuserve.program.ops import Then
from cpuserve.program.parts import columns

WORDS = "transformer.tokens_embed"


class OpenAiGpt:
    """OpenAI GPT. Source: transformers modeling_openai."""

    stored = StoredNames(published={r"^(tokens_embed|positions_embed)\.": r"transformer.\1."})

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in an OpenAI GPT config, where "gelu" is the one with tanh."""
        name = config.get("afn") or "gelu"
        wide = {"n_inner": None, "scale_attn_weights": None}
        fixed = {"scale_attn_by_inverse_layer_idx": None, "conv1d_transposed": None}
        places = config.get("n_positions")
        positions = {"n_positions": 512 if places is None else places}
        renamed = {"activation_function": "gelu_new" if name == "gelu" else name}
        return Gpt2.spec({**config, **wide, **fixed, **positions, **renamed})

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        x = b.embed(WORDS)
        b.position_embed(x, "transformer.positions_embed", rows=s.max_position)
        for i in range(s.layers):
            at, wide = f"transformer.h.{i}", 3 * s.width
            qkv = b.linear(x, columns(f"{at}.attn.c_attn", 0, wide), features=wide, bias=True)
            b.rope_store_kv(qkv, layer=i, rope=None)
            a = b.attention(qkv, layer=i)
            b.linear(a, columns(f"{at}.attn.c_proj", 0, s.width), bias=True, add_to=x, use="down")
            x = b.layer_norm(x, f"{at}.ln_1")
            up, then = columns(f"{at}.mlp.c_fc", 0, s.intermediate), cast("Then", s.activation)
            g = b.linear(x, up, features=s.intermediate, bias=True, then=then)
            b.linear(g, columns(f"{at}.mlp.c_proj", 0, s.width), bias=True, add_to=x, use="down")
            x = b.layer_norm(x, f"{at}.ln_2")
        b.logits(x, "lm_head", tied_to=WORDS if s.tied else None)
