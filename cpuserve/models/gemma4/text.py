"""Gemma 4 (text): two widths of heads, shared KV caches, per-layer embeddings, experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.models.config import read_bool, read_heads, read_int, read_windows, refuse
from cpuserve.models.experts import read_experts
from cpuserve.models.gemma import read_cap
from cpuserve.models.layer_inputs import gated_input, layer_inputs
from cpuserve.models.llama import finish_decoder, gated_mlp
from cpuserve.models.parts import SpecParts
from cpuserve.models.rope import split_ropes
from cpuserve.models.shared_caches import (
    first_shared,
    read_caches,
    read_shared_decoder,
    shared_attention,
)
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId

POSITIONS = 131072
PATTERN = 6  # without layer_types in the config, every sixth layer is global
ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    "sliding_attention": {"rope_type": "default"},
}


class Gemma4:
    """Gemma 4, text: global layers with wider heads, and possibly experts next to the dense MLP.

    The small models have per-layer embeddings, and later layers read the KV caches of earlier
    layers. Source: transformers modeling_gemma4. Key of parts in addition to those of
    shared_caches.py and layer_inputs.py: mlp_widths, the width of the MLP of each layer.
    """

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Gemma 4 text config."""
        if config.get("use_bidirectional_attention") not in (None, False, "vision"):
            value = config["use_bidirectional_attention"]
            refuse("use_bidirectional_attention", value, "null or vision: text must be causal")
        windows = _windows(config)
        heads, full_heads, one_kv = _heads(config, windows)
        if not config.get("rope_parameters"):
            config = {**config, "rope_parameters": ROPES}
        full, local_rope = split_ropes(config, heads[1], POSITIONS, theta=1e6, local_theta=1e4)
        widths = _mlp_widths(config)
        parts: SpecParts = {
            "windows": windows,
            "local_rope": local_rope,
            "local_heads": heads,
            "caches": read_caches(config, windows),
            "mlp_widths": widths,
            "one_kv": one_kv,
            "logit_softcap": read_cap(config, "final_logit_softcapping", 0.0),
            "input_width": read_int(config, "hidden_size_per_layer_input", 256, low=0),
            "input_vocab": read_int(config, "vocab_size_per_layer_input", 262144),
            "pad": read_int(config, "pad_token_id", 0, low=0),
        }
        if read_bool(config, "enable_moe_block", False):
            expert_keys = {"num_experts_per_tok": config.get("top_k_experts")}
            keys = {"count": "num_experts", "width": "moe_intermediate_size"}
            parts |= read_experts({**config, **expert_keys}, **keys)
        full |= dict(zip(("num_key_value_heads", "head_dim"), full_heads, strict=True))
        return read_shared_decoder(full, parts, POSITIONS)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        x = b.embed("model.embed_tokens", scale=s.embed_scale)
        inputs = layer_inputs(b, s, x) if s.parts["input_width"] else None
        for i in range(s.layers):
            prefix = f"model.layers.{i}"
            shared_attention(b, s, i, b.rms_norm(x, f"{prefix}.input_layernorm"), x)
            feed_forward(b, s, i, x)
            if inputs is not None:
                b.add(gated_input(b, s, i, inputs, x), to=x)
            b.scale(x, f"{prefix}.layer_scalar")
        softcap = s.parts["logit_softcap"]
        finish_decoder(b, s, b.rms_norm(x, "model.norm"), softcap=softcap)


class Gemma4Unified(Gemma4):
    """Gemma 4 Unified (12B), text: Gemma 4 without per-layer embeddings and experts.

    Source: transformers modeling_gemma4_unified.
    """

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Gemma 4 Unified text config."""
        settings = {key: value for key, value in config.items() if value is not None}
        defaults = {"max_position_embeddings": 262144, "sliding_window": 1024}
        absent = {"hidden_size_per_layer_input": 0, "enable_moe_block": False}
        return Gemma4.spec({**defaults, **settings, **absent})


def _windows(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the window of each layer; the last layer has none, whatever the config says."""
    window = read_int(config, "sliding_window", 512, low=0)
    windows = read_windows(config, window, default=lambda i: (i + 1) % PATTERN > 0)
    return (*windows[:-1], 0)


def _heads(
    config: Mapping[str, Any], windows: tuple[int, ...]
) -> tuple[tuple[int, int], tuple[int, int], bool]:
    """Return ((KV heads, head_dim) of layers with a window, same for global layers, one_kv).

    one_kv: whether global layers have no v_proj.

    transformers saves the sizes of global layers in per_layer_config, by layer number.
    """
    width = read_int(config, "hidden_size", high=1 << 20)
    local = {**config, "head_dim": read_int(config, "head_dim", 256, high=1024)}
    one_kv = read_bool(config, "attention_k_eq_v", False)
    full_heads = {**local, "head_dim": read_int(config, "global_head_dim", 512, high=1024)}
    if one_kv and config.get("num_global_key_value_heads") is not None:
        full_heads["num_key_value_heads"] = config["num_global_key_value_heads"]
    by_layer = config.get("per_layer_config")
    layer_heads = by_layer.get(str(windows.index(0))) if isinstance(by_layer, Mapping) else None
    full_heads |= layer_heads if isinstance(layer_heads, Mapping) else {}
    _, kv, head_dim = read_heads(local, width)
    _, wide_kv, wide_dim = read_heads(full_heads, width)
    return (kv, head_dim), (wide_kv, wide_dim), one_kv


def _mlp_widths(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the width of each layer's MLP; layers that share caches may be twice as wide."""
    layers, first_sharing = read_int(config, "num_hidden_layers", high=4096), first_shared(config)
    width = read_int(config, "intermediate_size", high=1 << 23)
    sharing_width = width * (2 if read_bool(config, "use_double_wide_mlp", False) else 1)
    return (width,) * first_sharing + (sharing_width,) * (layers - first_sharing)


def feed_forward(b: Builder, s: ModelSpec, layer: int, x: ValueId) -> None:
    """Add norm(the layer's MLP of x, and its experts if there are any) to x."""
    prefix, width = f"model.layers.{layer}", s.parts["mlp_widths"][layer]
    h = b.rms_norm(x, f"{prefix}.pre_feedforward_layernorm")
    out = gated_mlp(b, s, f"{prefix}.mlp", h, width)
    if "experts" in s.parts:
        out = b.rms_norm(out, f"{prefix}.post_feedforward_layernorm_1")
        b.add(_experts(b, s, prefix, x), to=out)
    b.add(b.rms_norm(out, f"{prefix}.post_feedforward_layernorm"), to=x)


def _experts(b: Builder, s: ModelSpec, prefix: str, x: ValueId) -> ValueId:
    """Return norm(mixture of experts of x); the router of the mixture has a norm of its own."""
    parts = ("gate_proj", "up_proj", "down_proj")
    experts = range(s.parts["experts"])
    mixed = b.mixture(
        b.rms_norm(x, f"{prefix}.pre_feedforward_layernorm_2"),
        f"{prefix}.router.proj",
        [[f"{prefix}.experts.{e}.{part}" for part in parts] for e in experts],
        features=s.parts["expert_width"],
        chosen=s.parts["chosen"],
        to=None,
        then=s.gated_activation,
        renormalize=True,
        routed_by=b.rms_norm(x, f"{prefix}.router.scale", bare=True, scale=s.width**-0.5),
        factors=f"{prefix}.router.per_expert_scale",
    )
    return b.rms_norm(mixed, f"{prefix}.post_feedforward_layernorm_2")
