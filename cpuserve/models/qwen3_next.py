"""Qwen3-Next: three gated delta nets for each attention with gates, and mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from cpuserve.models.base import register_model
from cpuserve.models.config import read_bool, read_int, read_kinds, refuse
from cpuserve.models.experts import read_experts, read_sparse_step
from cpuserve.models.llama import build_decoder, offset_norm, read_decoder
from cpuserve.models.qwen3_moe import qwen_shared_mlp
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId

KINDS = ("linear_attention", "full_attention")
# Keys of config.json for the sizes of a gated delta net, with transformers' defaults.
DELTA_SIZES = {
    "key_heads": ("linear_num_key_heads", 16),
    "value_heads": ("linear_num_value_heads", 32),
    "key_width": ("linear_key_head_dim", 128),
    "value_width": ("linear_value_head_dim", 128),
    "taps": ("linear_conv_kernel_dim", 4),
}
MOST_TAPS = 8  # kMaxTaps in csrc/kernels/table.h


@register_model("Qwen3NextForCausalLM")
class Qwen3Next:
    """Qwen3-Next, without its multi-token prediction. Source: transformers modeling_qwen3_next."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """The hyperparameters in a Qwen3-Next config.

        Without layer_types, every full_attention_interval-th layer (default 4) has attention.
        """
        layers = read_int(config, "num_hidden_layers", high=4096)
        bias = read_bool(config, "attention_bias", False)
        renormalize = read_bool(config, "norm_topk_prob", True)
        share = config.get("partial_rotary_factor")
        extra = {
            **read_experts(config, count="num_experts", width="moe_intermediate_size"),
            "renormalize": renormalize,
            "dense_layers": read_sparse_step(config, layers),
            "shared_width": read_int(config, "shared_expert_intermediate_size", high=1 << 24),
            "attends": _attends(config),
            "delta": _read_delta(config),
        }
        return read_decoder(
            {
                **config,
                "head_dim": config.get("head_dim") or 256,
                "partial_rotary_factor": 0.25 if share is None else share,
            },
            architecture="Qwen3NextForCausalLM",
            positions=32768,
            qkv_bias=bias,
            out_bias=bias,
            extra=extra,
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the ops of the model to `b`."""
        build_decoder(b, s, attention=_mix, mlp=qwen_shared_mlp, norm=offset_norm)


def _attends(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """Whether each layer has attention, rather than a gated delta net."""

    def default(layer: int) -> str:
        return KINDS[(layer + 1) % read_int(config, "full_attention_interval", 4) == 0]

    kinds = read_kinds(config, "layer_types", KINDS, default)
    return tuple(kind == "full_attention" for kind in kinds)


def _read_delta(config: Mapping[str, Any]) -> dict[str, int]:
    sizes = {
        name: read_int(config, key, default, high=65536)
        for name, (key, default) in DELTA_SIZES.items()
    }
    if sizes["value_heads"] % sizes["key_heads"]:
        want = f"a multiple of linear_num_key_heads ({sizes['key_heads']})"
        refuse("linear_num_value_heads", sizes["value_heads"], want)
    if not 2 <= sizes["taps"] <= MOST_TAPS:
        refuse("linear_conv_kernel_dim", sizes["taps"], f"an integer from 2 to {MOST_TAPS}")
    return sizes


def _mix(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's attention or gated delta net of h to x."""
    attends = cast("tuple[bool, ...]", s.extra["attends"])
    if attends[layer]:
        _attention(b, s, f"model.layers.{layer}.self_attn", sum(attends[:layer]), h, x)
    else:
        _delta(b, s, f"model.layers.{layer}.linear_attn", h, x)


def _attention(b: Builder, s: ModelSpec, at: str, layer: int, h: ValueId, x: ValueId) -> None:
    """Add attention to x; gates of its heads multiply its output by their sigmoid.

    layer: its number among the layers with attention.
    """
    d = s.head_dim
    features = [2 * s.q_heads * d, s.kv_heads * d, s.kv_heads * d]
    qkv = b.linear(h, [f"{at}.{n}_proj" for n in "qkv"], features=features, bias=s.qkv_bias)
    qkv = b.split_gates(qkv)
    b.rope_store_kv(
        qkv,
        layer=layer,
        rope=s.rope,
        q_norm=f"{at}.q_norm",
        k_norm=f"{at}.k_norm",
        plus_one=True,
    )
    a = b.attention(qkv, layer=layer)
    b.gate(qkv, to=a)
    b.linear(a, f"{at}.o_proj", bias=s.out_bias, add_to=x)


def _delta(b: Builder, s: ModelSpec, at: str, h: ValueId, x: ValueId) -> None:
    """Add a gated delta net of h to x."""
    sizes = cast("dict[str, int]", s.extra["delta"])
    heads = sizes["value_heads"]
    width = 2 * (sizes["key_heads"] * sizes["key_width"] + heads * sizes["value_width"])
    qkvz = b.linear(h, f"{at}.in_proj_qkvz", features=width)
    gates = b.linear(h, f"{at}.in_proj_ba", features=2 * heads)
    b.linear(b.gated_delta(qkvz, gates, at, **sizes), f"{at}.out_proj", add_to=x)
