"""MiMo V2: values are narrower than keys, and layers with a window have more heads of keys."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal

from cpuserve.models.config import (
    read_bool,
    read_flags,
    read_float,
    read_int,
    read_object,
    read_windows,
    refuse,
)
from cpuserve.models.decoder_row import ATTENTION_BIAS, Config, DecoderRow, without_nulls
from cpuserve.models.experts import (
    read_dense_layers,
    read_experts,
    read_groups,
    sigmoid_mixture,
)
from cpuserve.models.llama import build_decoder, layer_rope, layer_window
from cpuserve.models.rope import split_ropes
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import StoredNames
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId
from cpuserve.program.parts import rows
from cpuserve.program.program import Use


def _keys(config: Config) -> Config:
    """Return the config with one of two spellings, and with the RoPE of both kinds of layers.

    sliding_window counts the token itself, and sliding_window_size does not.
    """
    has_value_scale = config.get("attention_value_scale", 0.707) is not None
    config = {"head_dim": 192, "attention_value_scale": 0.707, **without_nulls(config)}
    config = {"rms_norm_eps": config.get("layernorm_epsilon", 1e-5), **config}
    if "sliding_window_size" in config:
        config["sliding_window"] = read_int(config, "sliding_window_size") + 1
    if not has_value_scale:
        config["attention_value_scale"] = 1.0
    head_dim = read_int(config, "head_dim", high=1024)
    full, local_rope = split_ropes(_ropes(config), head_dim, 131072, theta=5e6, local_theta=1e4)
    return {**full, "local_rope": local_rope}


def _layers(config: Config) -> dict[str, Any]:
    kv_heads = read_int(config, "num_key_value_heads", high=65536)
    window = read_int(config, "sliding_window", 129)
    window_flags = read_flags(config, "hybrid_layer_pattern", lambda i: i > 0 and (i + 1) % 6 > 0)
    return {
        "parts": {
            "windows": read_windows(config, window, default=lambda i: window_flags[i]),
            "local_kv_heads": read_int(config, "swa_num_key_value_heads", 2 * kv_heads),
            "values": read_int(config, "v_head_dim", high=config["head_dim"]),
            "value_scale": read_float(config, "attention_value_scale"),
            "fused": False,
            **read_experts(config, count="n_routed_experts", width="moe_intermediate_size"),
            "shared": 0,
            "dense_layers": _read_dense(config),
            "groups": read_groups(config, (1, 1), best=2),
            "expert_scale": read_float(config, "routed_scaling_factor", 1.0),
            "renormalize": read_bool(config, "norm_topk_prob", True),
            "local_rope": config["local_rope"],
        }
    }


def _read_dense(config: Config) -> tuple[int, ...]:
    """Return the layers without experts: by mlp_layer_types, or by the flags moe_layer_freq."""
    if config.get("mlp_layer_types") is not None:
        return read_dense_layers(config, first=1)
    sparse = read_flags(config, "moe_layer_freq", lambda i: i > 0)
    return tuple(i for i, flag in enumerate(sparse) if not flag)


def _ropes(config: Config) -> dict[str, Any]:
    """Return the config with rope_parameters by the kind of layer."""
    share = config.get("partial_rotary_factor", 0.334)
    full_rope = {"rope_theta": config.get("rope_theta", 5e6), "partial_rotary_factor": share}
    local = {"rope_theta": config.get("swa_rope_theta", 1e4), "partial_rotary_factor": share}
    ropes_by_kind = config.get("rope_parameters") or {
        "full_attention": full_rope,
        "sliding_attention": local,
    }
    rest_of_config = {k: v for k, v in config.items() if k != "partial_rotary_factor"}
    return {**rest_of_config, "rope_parameters": ropes_by_kind}


def _attention(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add attention of h to x. The cache has values that are as wide as keys, with zeros."""
    prefix, d, values = f"model.layers.{layer}.self_attn", s.head_dim, s.parts["values"]
    window = layer_window(s, layer)
    kv_heads = s.parts["local_kv_heads"] if window else s.kv_heads
    parts = {"q": s.q_heads * d, "k": kv_heads * d, "v": kv_heads * values}
    names = [f"{prefix}.{part}_proj" for part in parts]
    if s.parts["fused"]:
        firsts = (0, parts["q"], parts["q"] + parts["k"])
        sizes = zip(firsts, parts.values(), strict=True)
        names = [rows(f"{prefix}.qkv_proj", begin, count) for begin, count in sizes]
    use: Use | Literal["qkv"] = "values" if s.parts["fused"] else "qkv"
    qkv = b.linear(h, names, features=list(parts.values()), bias=s.qkv_bias, use=use)
    if values < d:
        qkv = b.resize_heads(qkv, begin=parts["q"] + parts["k"], heads=kv_heads, to=d)
    b.rope_store_kv(qkv, layer=layer, rope=layer_rope(s, layer), heads=(kv_heads, d))
    a = b.attention(qkv, layer=layer, window=window, sinks=f"{prefix}.sinks" if window else None)
    if values < d:
        a = b.resize_heads(a, begin=0, heads=s.q_heads, to=values)
    b.multiply_by(a, s.parts["value_scale"])
    b.linear(a, f"{prefix}.o_proj", add_to=x, use="output")


MiMoV2Flash = DecoderRow(
    "MiMo-V2-Flash: windows with attention sinks, and experts chosen by a sigmoid and a bias."
    " Source: transformers modeling_mimo_v2_flash.",
    positions=131072,
    layers=partial(build_decoder, attention=_attention, mlp=sigmoid_mixture),
    prepare=_keys,
    defaults={
        "num_key_value_heads": 4,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
    },
    bias=ATTENTION_BIAS,
    out_bias=False,
    read_arguments=_layers,
    stored=StoredNames(published={r"\.self_attn\.attention_sink_bias": ".self_attn.sinks"}),
)


def _without_fp8(config: Config) -> Config:
    """Return the config; ModelError for FP8 files, with rows and scales by the order of ranks."""
    method = read_object(config, "quantization_config").get("quant_method")
    if method == "fp8":
        refuse("quant_method", method, "absent: a GGUF file of this model runs")
    return _keys(config)


MiMoV2 = replace(
    MiMoV2Flash,
    about="MiMo V2.5 and V2.5 Pro: V2-Flash with q, k and v in one matrix. Source: vLLM mimo_v2.",
    prepare=_without_fp8,
    finish=lambda spec, _config: replace(spec, parts={**spec.parts, "fused": True}),
)
