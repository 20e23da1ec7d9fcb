"""Lara Mini: gated delta nets, attention with and without a window, and experts in all layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.models.config import read_bool, read_choice, read_int, read_kinds
from cpuserve.models.delta_nets import read_delta
from cpuserve.models.experts import qwen_mlp, read_shared_experts
from cpuserve.models.llama import build_decoder, gated_mlp, read_decoder, self_attention
from cpuserve.models.parts import SpecParts
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import StoredNames
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId
from cpuserve.program.parts import rows

_NET, _WINDOW, _WHOLE = KINDS = ("linear_attention", "sliding_attention", "full_attention")
PATTERN = (_NET, _WINDOW, _NET, _WHOLE, _WINDOW)


class LaraMini:
    """Lara Mini: only layers with a window have a RoPE. Source: transformers modeling_lara_mini."""

    stored = StoredNames(
        joined={
            ".linear_attn.in_proj": tuple(f".linear_attn.in_proj_{n}" for n in ("qkv", *"zba"))
        },
        published={r"\.linear_attn\.out_norm\.": ".linear_attn.norm."},
    )

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Lara Mini config."""
        defaults = {
            "num_key_value_heads": 4,
            "head_dim": 128,
            "tie_word_embeddings": True,
            "num_experts": 128,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        }
        config = {**defaults, **{key: value for key, value in config.items() if value is not None}}
        config = {**config, "intermediate_size": config["moe_intermediate_size"]}
        kinds = read_kinds(config, "layer_types", KINDS, lambda i: PATTERN[i % len(PATTERN)])
        # The convolutions of gated delta nets have this activation as well.
        read_choice(config, "hidden_act", "silu", {"silu": "silu", "swish": "silu"})
        window = read_int(config, "sliding_window", 512)
        parts: SpecParts = {
            **read_shared_experts(config, renormalize=read_bool(config, "norm_topk_prob", True)),
            "dense_layers": (),
            "windows": tuple(window if kind == _WINDOW else 0 for kind in kinds),
            "no_rope": tuple(i for i, kind in enumerate(kinds) if kind == _WHOLE),
            "attends": tuple(kind != _NET for kind in kinds),
            "delta": read_delta(config, key_heads=8, value_heads=16),
        }
        bias = read_bool(config, "attention_bias", False)
        return read_decoder(config, positions=131072, qkv_bias=bias, out_bias=bias, parts=parts)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        build_decoder(b, s, attention=_mix, mlp=_mlp)


def _mix(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add attention or a gated delta net of h to x."""
    attends = s.parts["attends"]
    if attends[layer]:
        self_attention(b, s, layer, h, x, qk_norm=True, cache=sum(attends[:layer]))
        return
    at, sizes = f"model.layers.{layer}.linear_attn", s.parts["delta"]
    values = sizes["value_heads"] * sizes["value_width"]
    # The rows of the matrix are queries, keys, values, gates of the output, and b and a of heads.
    wide = 2 * (sizes["key_heads"] * sizes["key_width"] + values)
    inputs = b.linear(h, rows(f"{at}.in_proj", 0, wide), features=wide)
    heads = 2 * sizes["value_heads"]
    gates = b.linear(h, rows(f"{at}.in_proj", wide, heads), features=heads)
    out = b.gated_delta(inputs, gates, at, tiled=False, **sizes)
    b.linear(out, f"{at}.out_proj", add_to=x)


def _mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the chosen experts of h, and one for all tokens, to x."""
    qwen_mlp(b, s, layer, h, x)
    at = f"model.layers.{layer}.mlp.shared_expert"
    gated_mlp(b, s, at, h, s.parts["shared_width"], to=x)
