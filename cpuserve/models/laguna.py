"""Laguna: layers with different numbers of heads, gates by softplus, and experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.models.config import read_bool, read_float, read_int, read_windows, refuse
from cpuserve.models.experts import add_mixture, read_dense_layers, read_experts
from cpuserve.models.llama import (
    build_decoder,
    dense_mlp,
    gated_mlp,
    layer_rope,
    layer_window,
    read_decoder,
)
from cpuserve.models.parts import SpecParts
from cpuserve.models.rope import split_ropes
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import StoredNames
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId

_ROPES = {
    "full_attention": {"rope_theta": 5e5, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_theta": 1e4},
}
_GATES = {"per-head": True, "per_head": True, "per-element": False, "per_element": False}


class Laguna:
    """Laguna XS.2 and M.1: layers differ in their number of heads. Source: modeling_laguna."""

    stored = StoredNames(
        {
            r"\.mlp\.gate\.e_score_": ".mlp.experts.e_score_",
            r"\.mlp\.shared_experts\.": ".mlp.shared_expert.",
        }
    )

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Laguna config."""
        if read_bool(config, "moe_apply_router_weight_on_input", False):
            refuse("moe_apply_router_weight_on_input", True, "false")
        if config.get("moe_router_logit_softcapping"):
            refuse("moe_router_logit_softcapping", config["moe_router_logit_softcapping"], "0")
        layers = read_int(config, "num_hidden_layers", high=4096)
        window = read_int(config, "sliding_window", 512, low=0)
        head_dim = read_int(config, "head_dim", 128)
        heads = _read_heads(config, layers)
        parts: SpecParts = {
            "windows": read_windows(config, window, default=lambda _: False),
            "heads": heads,
            "gate_per_head": _read_gates(config),
            **read_experts(config, count="num_experts", width="moe_intermediate_size"),
            "shared_width": read_int(config, "shared_expert_intermediate_size", high=1 << 24),
            "dense_layers": read_dense_layers(config, first=1),
            "expert_scale": read_float(config, "moe_routed_scaling_factor", 1.0),
        }
        if not config.get("rope_parameters"):
            config = {**config, "rope_parameters": _ROPES}
        plain, local = split_ropes(config, head_dim, 131072, theta=5e5, local_theta=1e4)
        bias = read_bool(config, "attention_bias", False)
        return read_decoder(
            {**plain, "num_attention_heads": max(heads), "head_dim": head_dim},
            positions=131072,
            qkv_bias=bias,
            out_bias=bias,
            parts={**parts, "local_rope": local},
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        build_decoder(b, s, attention=_attention, mlp=_mlp)


def _read_heads(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Return the number of query heads of each layer."""
    key = "num_attention_heads_per_layer"
    every, heads = config.get(key), read_int(config, "num_attention_heads", high=65536)
    if every is None:
        return (heads,) * layers
    kv_heads = read_int(config, "num_key_value_heads", high=65536)
    if (
        not isinstance(every, list)
        or len(every) != layers
        or any(type(n) is not int or not 0 < n <= 65536 or n % kv_heads for n in every)
    ):
        refuse(key, every, f"{layers} multiples of num_key_value_heads, {kv_heads}")
    return tuple(every)


def _read_gates(config: Mapping[str, Any]) -> bool:
    """Return whether attention has one gate for each head, instead of one for each column."""
    gating = config.get("gating", True)
    every = config.get("gating_types") or ["per-head" if gating is True else gating]
    kinds = {str(kind) for kind in every}
    if len(kinds) != 1 or (kind := kinds.pop()) not in _GATES:
        refuse("gating", gating, 'true, "per-head" or "per-element", alike in all layers')
    return _GATES[kind]


def _attention(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add attention of h to x; softplus(linear(h)) multiplies its heads or columns."""
    at, d = f"model.layers.{layer}.self_attn", s.head_dim
    heads = s.parts["heads"][layer]
    counts = {"q_proj": heads, "k_proj": s.kv_heads, "v_proj": s.kv_heads}
    names, features = [f"{at}.{name}" for name in counts], [n * d for n in counts.values()]
    qkv = b.linear(h, names, features=features, bias=s.qkv_bias, use="qkv")
    q_norm, k_norm = f"{at}.q_norm", f"{at}.k_norm"
    b.rope_store_kv(
        qkv, layer=layer, rope=layer_rope(s, layer), q_norm=q_norm, k_norm=k_norm, q_heads=heads
    )
    a = b.attention(qkv, layer=layer, window=layer_window(s, layer), q_heads=heads)
    gates = b.linear(h, f"{at}.g_proj", features=heads * (1 if s.parts["gate_per_head"] else d))
    b.soft_gate(gates, to=a)
    b.linear(a, f"{at}.o_proj", bias=s.out_bias, add_to=x, use="output")


def _mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's experts of h plus the shared expert to x, or else its plain MLP of h."""
    if layer in s.parts["dense_layers"]:
        dense_mlp(b, s, layer, h, x)
        return
    at = f"model.layers.{layer}.mlp"
    add_mixture(
        b,
        s,
        at,
        h,
        x,
        parts=("gate_proj", "up_proj", "down_proj"),
        renormalize=True,
        score="sigmoid",
        scale=s.parts["expert_scale"],
        bias=f"{at}.experts.e_score_correction_bias",
    )
    gated_mlp(b, s, f"{at}.shared_expert", h, s.parts["shared_width"], to=x)
