"""LFM3: layers with short convolutions, or with attention and a gate for each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from cpuserve.models.config import read_bool, read_heads, read_int, read_kinds, read_taps
from cpuserve.models.lfm2 import lfm_mlp, short_convolution
from cpuserve.models.llama import attend, finish_decoder, read_decoder
from cpuserve.models.rope import split_ropes
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId

KINDS = ("conv", "sliding_attention", "full_attention")
POSITIONS = 128000
# The RoPE of layers without a window rotates half of the dimensions of a head.
FULL_ROPE = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5}


class Lfm3:
    """LFM3: LFM2 with windows, norms of results, and gates of heads. Source: modeling_lfm3."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in an LFM3 config."""
        given = {k: v for k, v in config.items() if v is not None and k != "hidden_act"}
        # The activation is always SiLU, even if hidden_act has another value.
        config = {"norm_eps": 1e-5, "tie_word_embeddings": True, **given}
        config["head_dim"] = read_int(config, "head_dim", 128)
        kinds = read_kinds(config, "layer_types", KINDS, _default_kind)
        window = read_int(config, "sliding_window", 256)
        _, _, head_dim = read_heads(config, read_int(config, "hidden_size", high=1 << 20))
        if config.get("rope_parameters") is None:
            config["rope_parameters"] = {"full_attention": FULL_ROPE}
        config, local_rope = split_ropes(config, head_dim, POSITIONS, theta=1e6, local_theta=1e4)
        bias = read_bool(config, "attention_bias", False)
        extra: dict[str, object] = {
            "kinds": kinds,
            "windows": tuple(window if kind == KINDS[1] else 0 for kind in kinds),
            "local_rope": local_rope,
            "taps": read_taps(config, "conv_L_cache", 7),
            "conv_bias": read_bool(config, "conv_bias", False),
            "norms_results": read_bool(config, "use_sandwich_norm", True),
            "gated": read_bool(config, "use_attention_gate", True),
        }
        return read_decoder(
            config,
            positions=POSITIONS,
            eps="norm_eps",
            qkv_bias=bias,
            out_bias=bias,
            extra=extra,
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        kinds = cast("tuple[str, ...]", s.extra["kinds"])
        norms = cast("bool", s.extra["norms_results"])
        x = b.embed("model.embed_tokens")
        to = None if norms else x
        for i, kind in enumerate(kinds):
            at = f"model.layers.{i}"
            h = b.rms_norm(x, f"{at}.operator_norm")
            if kind == "conv":
                out = short_convolution(b, s, f"{at}.conv", h, to)
            else:
                out = _attention(b, s, i, i - kinds[:i].count("conv"), h, to)
            if norms:
                b.add(b.rms_norm(out, f"{at}.post_operator_norm"), to=x)
            out = lfm_mlp(b, s, i, b.rms_norm(x, f"{at}.ffn_norm"), to)
            if norms:
                b.add(b.rms_norm(out, f"{at}.post_ffn_norm"), to=x)
        finish_decoder(b, s, b.rms_norm(x, "model.embedding_norm"))


def _default_kind(layer: int) -> str:
    if layer % 4 == 2:
        return "full_attention"
    return "sliding_attention" if layer % 4 == 0 and layer else "conv"


def _attention(
    b: Builder, s: ModelSpec, layer: int, cache: int, h: ValueId, to: ValueId | None
) -> ValueId:
    """Return the attention of h, added to `to` unless it is None; a gate multiplies each head.

    cache: the number of this layer's KV cache: only attention layers have one.
    """
    at = f"model.layers.{layer}.self_attn"
    a = attend(b, s, layer, h, qk_norm=True, cache=cache)
    if s.extra["gated"]:
        b.gate(b.linear(h, f"{at}.gate_proj", features=s.q_heads), to=a, heads=s.q_heads)
    return b.linear(a, f"{at}.o_proj", features=s.width, bias=s.out_bias, add_to=to)
