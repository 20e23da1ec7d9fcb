"""GPT-NeoX and Pythia: layer norms, plain MLPs, and one matrix with q, k and v of each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.models.activations import ACTIVATIONS
from cpuserve.models.config import read_bool, read_choice, read_int, refuse
from cpuserve.models.head_norms import norm_heads
from cpuserve.models.llama import read_decoder
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import StoredNames
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId
from cpuserve.program.parts import rows
from cpuserve.program.program import Use


class GptNeoX:
    """GPT-NeoX and Pythia: layer norms; attention and MLP may read the same x (in parallel).

    Source: transformers modeling_gpt_neox.
    """

    stored = StoredNames({r"^lm_head\.": "embed_out."})

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a GPT-NeoX config."""
        activation = read_choice(config, "hidden_act", "gelu", ACTIVATIONS)
        bias = read_bool(config, "attention_bias", True)
        width, heads = read_int(config, "hidden_size"), read_int(config, "num_attention_heads")
        if config.get("head_dim") not in (None, width // heads):  # it would change the RoPE only
            refuse("head_dim", config["head_dim"], f"{width // heads}, or absent")
        own = {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
        rope = {new: config[old] for old, new in own.items() if config.get(old) is not None}
        return read_decoder(
            {
                "partial_rotary_factor": 0.25,
                "layer_norm_eps": 1e-5,
                **config,
                **rope,
                "hidden_act": "silu",
                "head_dim": None,
            },
            positions=2048,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=True,
            parts={
                "activation": activation,
                "parallel": read_bool(config, "use_parallel_residual", True),
            },
            eps="layer_norm_eps",
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        x = b.embed("gpt_neox.embed_in")
        for i in range(s.layers):
            at = f"gpt_neox.layers.{i}"
            h = b.layer_norm(x, f"{at}.input_layernorm")
            if s.parts["parallel"]:
                mlp = b.layer_norm(x, f"{at}.post_attention_layernorm")
                grouped_attention(b, s, i, f"{at}.attention", h, x)
            else:
                grouped_attention(b, s, i, f"{at}.attention", h, x)
                mlp = b.layer_norm(x, f"{at}.post_attention_layernorm")
            plain_mlp(b, s, f"{at}.mlp", mlp, x)
        h = b.layer_norm(x, "gpt_neox.final_layer_norm")
        b.logits(h, "embed_out", tied_to="gpt_neox.embed_in" if s.tied else None)


def grouped_attention(
    b: Builder,
    s: ModelSpec,
    layer: int,
    at: str,
    h: ValueId,
    x: ValueId,
    *,
    alibi: bool = False,
    head_norm: bool = False,
) -> None:
    """Add the layer's attention of h to x, with the matrices below the name `at`.

    The tensor with q, k and v has the query heads of the first KV head, then its k, then its v,
    and then the same for the next KV head.

    alibi: as in `Builder.attention`.
    head_norm: all q heads have one layer norm, and all k heads another (Persimmon).
    """
    d, each = s.head_dim, s.q_heads // s.kv_heads
    parts = {}
    for first, count in ((0, each), (each, 1), (each + 1, 1)):
        for group in range(s.kv_heads):
            begin = (group * (each + 2) + first) * d
            parts[rows(f"{at}.query_key_value", begin, count * d)] = count * d
    qkv = b.linear(h, list(parts), features=list(parts.values()), bias=s.qkv_bias)
    if head_norm:
        q, k = f"{at}.q_layernorm", f"{at}.k_layernorm"
        norm_heads(b, s, qkv, (q,) * s.q_heads, (k,) * s.kv_heads, bias=True)
    b.rope_store_kv(qkv, layer=layer, rope=s.rope)
    a = b.attention(qkv, layer=layer, alibi=alibi)
    use: Use = "linear" if head_norm else "output"
    b.linear(a, f"{at}.dense", bias=s.out_bias, add_to=x, use=use)


def plain_mlp(b: Builder, s: ModelSpec, at: str, h: ValueId, x: ValueId) -> None:
    """Add the MLP of h, which has no gate, to x."""
    then = s.parts["activation"]
    g = b.linear(h, f"{at}.dense_h_to_4h", features=s.intermediate, bias=s.mlp_bias, then=then)
    b.linear(g, f"{at}.dense_4h_to_h", bias=s.mlp_bias, add_to=x, use="down")
