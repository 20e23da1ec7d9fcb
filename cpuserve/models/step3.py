"""Step 3.5 and 3.7: windows with more heads, gates of heads, and experts with limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cpuserve.models.config import (
    read_bool,
    read_float,
    read_heads,
    read_int,
    read_object,
    read_windows,
    refuse,
)
from cpuserve.models.decoder_row import without_nulls
from cpuserve.models.experts import read_dense_layers, read_experts, read_limits
from cpuserve.models.llama import (
    before_silu,
    finish_decoder,
    gated_mlp,
    guess_inputs,
    heads_of,
    layer_rope,
    layer_window,
    offset_norm,
    read_decoder,
)
from cpuserve.models.parts import SpecParts
from cpuserve.models.rope import split_ropes
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import StoredNames
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId
from cpuserve.program.parts import rows

# Keys of published configs, with the keys of transformers.
_SPELLINGS = {
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim",
}
_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "n_routed_experts": 288,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1280,
}


class Step35:
    """Step 3.5 Flash, and the part for text of Step 3.7 Flash.

    Source: transformers modeling_step3p7.
    """

    stored = StoredNames(
        {
            r"\.mlp\.gate\.e_score_correction_bias": ".moe.router_bias",
            r"\.mlp\.gate\.": ".moe.gate.",
            r"\.mlp\.experts\.(gate_up|down)_proj": r".moe.\1_proj.weight",
            r"\.mlp\.shared_experts\.": ".share_expert.",
        },
        cut=lambda _: {".moe.gate_up_proj": {".moe.gate_proj": 1, ".moe.up_proj": 1}},
    )

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Step 3.5 config.

        Lists of published configs may go on with layers for multi-token prediction.
        """
        settings = without_nulls(config)
        settings = {**_DEFAULTS, **{_SPELLINGS.get(key, key): v for key, v in settings.items()}}
        layers = read_int(settings, "num_hidden_layers", high=4096)
        kind_after = _kind_after(settings, layers)
        for key, value in settings.items():
            if isinstance(value, list) and key in _BY_LAYER:
                settings[key] = value[:layers]
        window = read_int(settings, "sliding_window", 0, low=0)
        windows = read_windows(settings, window, default=lambda _: False)
        if not window and "sliding_attention" in settings.get("layer_types", ()):
            refuse("sliding_window", None, "a number, because layers have a sliding window")
        heads = read_int(settings, "num_attention_heads", high=65536)
        local = _read_local_heads(settings, heads)
        by_layer = tuple(local if keys else heads for keys in windows)
        parts: SpecParts = {
            "windows": windows,
            "heads": by_layer,
            **read_experts(settings, count="n_routed_experts", width="moe_intermediate_size"),
            "shared_width": read_int(settings, "share_expert_dim", 1280, high=1 << 24),
            "dense_layers": _read_dense(settings, layers),
            "expert_scale": read_float(settings, "moe_router_scaling_factor", 1.0),
            # Only configs of GGUF files have this key.
            "joined_gates": read_bool(settings, "moe_gate_up_joined", False),
            "limits": read_limits(settings, "swiglu_limits", layers),
            "shared_limits": read_limits(settings, "swiglu_limits_shared", layers),
        }
        slides = kind_after == "sliding_attention" and window > 0
        parts["guess"] = {
            "windows": (window if slides else 0,),
            "heads": (local if slides else heads,),
            "dense_layers": (0,),
            "limits": (0.0,),
            "shared_limits": (0.0,),
        }
        bias = read_bool(settings, "attention_bias", False)
        head_dim = read_int(settings, "head_dim")
        full_config, rope = split_ropes(
            _ropes(settings), head_dim, 128000, theta=1e4, local_theta=1e4
        )
        spec = read_decoder(
            # transformers sets this activation, whatever the config has.
            {**full_config, "num_attention_heads": max(by_layer), "hidden_act": "silu"},
            positions=128000,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=read_bool(settings, "mlp_bias", False),
            parts={**parts, "local_rope": rope},
        )
        scalar = read_float(settings, "query_pre_attn_scalar", float(head_dim))
        return replace(spec, attention_scale=scalar**-0.5)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        x = guess_inputs(b, s, offset_norm) if s.guesses else b.embed("model.embed_tokens")
        for layer in range(s.layers):
            prefix = f"model.layers.{layer}"
            _attention(b, s, layer, offset_norm(b, x, f"{prefix}.input_layernorm"), x)
            _feed_forward(b, s, layer, offset_norm(b, x, f"{prefix}.post_attention_layernorm"), x)
        # A head reads the stream before the last norm, of the model and of the head itself.
        finish_decoder(b, s, offset_norm(b, x, "model.norm"), kept=x)


def _kind_after(config: Mapping[str, Any], layers: int) -> str:
    """Return the kind of the first head, which layer_types has after the model's layers."""
    head_kinds, kinds = config.get("mtp_layer_types"), config.get("layer_types")
    if isinstance(head_kinds, list) and head_kinds:
        return str(head_kinds[0])
    longer = isinstance(kinds, list) and len(kinds) > layers
    return str(kinds[layers]) if kinds and longer else "sliding_attention"


_BY_LAYER = (
    *("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared"),
    *("rope_theta", "partial_rotary_factors"),
)


def _read_local_heads(config: Mapping[str, Any], heads: int) -> int:
    """Return the number of query heads of layers with a window."""
    other_setting = read_object(config, "attention_other_setting")
    settings = {"num_sliding_attention_heads": other_setting.get("num_attention_heads"), **config}
    local = read_int(settings, "num_sliding_attention_heads", heads, high=65536)
    read_heads({**config, "num_attention_heads": local}, 1)
    return local


def _read_dense(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Return the layers without experts; moe_layers_enum lists the others, as "3,4,5"."""
    moe_layers = config.get("moe_layers_enum")
    if moe_layers is None or config.get("mlp_layer_types") is not None:
        return read_dense_layers(config, first=3)
    names = moe_layers.split(",") if isinstance(moe_layers, str) else moe_layers
    if not isinstance(names, list) or not all(str(name).strip().isdecimal() for name in names):
        refuse("moe_layers_enum", moe_layers, "numbers of layers")
    sparse = {int(name) for name in names}
    return tuple(layer for layer in range(layers) if layer not in sparse)


def _ropes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with rope_parameters by the kind of layer.

    Published configs have lists of bases and shares by layer, and a scaling for full attention.
    """
    kinds = config.get("layer_types") or ["full_attention"]
    settings = {"rope_theta": 1e4, "partial_rotary_factors": 1.0, **config}
    params_by_kind = read_object(config, "rope_parameters")
    ropes: dict[str, Any] = {}
    for kind in ("full_attention", "sliding_attention"):
        example = kinds.index(kind) if kind in kinds else 0
        theta, share = (
            _of_layer(settings, key, example) for key in ("rope_theta", "partial_rotary_factors")
        )
        scaling = read_object(config, "rope_scaling") if kind == "full_attention" else {}
        params = {"rope_theta": theta, "partial_rotary_factor": share, **scaling}
        ropes[kind] = {**params, **read_object(params_by_kind, kind)}
    rope_keys = ("rope_theta", "partial_rotary_factors", "rope_scaling")
    return {k: v for k, v in config.items() if k not in rope_keys} | {"rope_parameters": ropes}


def _of_layer(config: Mapping[str, Any], key: str, layer: int) -> object:
    """Return config[key], or its value for a layer if it is a list."""
    value = config[key]
    if not isinstance(value, list) or not value:
        return value
    if layer >= len(value):
        refuse(key, value, "one number, or a list with a number for each layer")
    return value[layer]


def _attention(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add attention of h to x; the sigmoid of a linear of h multiplies each head."""
    prefix, heads = f"model.layers.{layer}.self_attn", s.parts["heads"][layer]
    qkv = heads_of(b, s, prefix, h, (heads, s.kv_heads))
    b.rope_store_kv(
        qkv,
        layer=layer,
        rope=layer_rope(s, layer),
        q_norm=f"{prefix}.q_norm",
        k_norm=f"{prefix}.k_norm",
        plus_one=True,
        q_heads=heads,
    )
    window, scale = layer_window(s, layer), s.attention_scale
    a = b.attention(qkv, layer=layer, window=window, scale=scale, q_heads=heads)
    b.gate(b.linear(h, f"{prefix}.g_proj", features=heads), to=a, heads=heads)
    b.linear(a, f"{prefix}.o_proj", bias=s.out_bias, add_to=x, use="output")


def _feed_forward(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add to x the experts of h, chosen and shared, or the plain MLP of h."""
    prefix = f"model.layers.{layer}"
    if layer in s.parts["dense_layers"]:
        _mlp(b, s, layer, f"{prefix}.mlp", h, s.intermediate, x)
        return
    width, count = s.parts["expert_width"], s.parts["experts"]
    parts = [("gate_proj", 0, width), ("up_proj", 0, width), ("down_proj", 0, s.width)]
    if s.parts["joined_gates"]:
        parts[:2] = [("gate_up_proj", 0, width), ("gate_up_proj", width, width)]
    limit = s.parts["limits"][layer]
    b.mixture(
        h,
        f"{prefix}.moe.gate",
        [[rows(f"{prefix}.moe.{p}", i, n, index=e) for p, i, n in parts] for e in range(count)],
        features=width,
        chosen=s.parts["chosen"],
        to=x,
        score="sigmoid",
        renormalize=True,
        scale=s.parts["expert_scale"],
        bias=f"{prefix}.moe.router_bias",
        limit=limit,
        gate_limit=before_silu(limit),
    )
    _mlp(b, s, layer, f"{prefix}.share_expert", h, s.parts["shared_width"], x)


def _mlp(
    b: Builder, s: ModelSpec, layer: int, prefix: str, h: ValueId, features: int, x: ValueId
) -> None:
    """Add the gated MLP of h to x; some layers have limits."""
    limit = s.parts["shared_limits"][layer]
    gated_mlp(b, s, prefix, h, features, to=x, silu_limit=limit)
