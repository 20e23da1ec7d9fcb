"""Hunyuan V1, dense and mixtures: rows; norms of queries and keys follow the RoPE."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from cpuserve.models.config import read_bool, read_float, read_heads, read_int, read_object, refuse
from cpuserve.models.decoder_row import ATTENTION_BIAS, Config, DecoderRow
from cpuserve.models.experts import add_mixture, read_experts
from cpuserve.models.llama import build_decoder, gated_mlp, heads_of
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId


def _keys(config: Config) -> Config:
    """Return the config with the keys of Llama."""
    if read_bool(config, "use_cla", False):
        refuse("use_cla", True, "false: keys and values shared by layers are not supported")
    if not read_bool(config, "use_qk_norm", True):
        refuse("use_qk_norm", False, "true, as transformers has these models")
    if config.get("head_dim") is None and config.get("attention_head_dim") is not None:
        config = {**config, "head_dim": config["attention_head_dim"]}
    return _with_alpha(config)


def _with_alpha(config: Config) -> Config:
    """Return the config, where `alpha` of a "dynamic" RoPE has become a factor of its base.

    In Hunyuan OCR such a RoPE is called "xdrope".
    """
    params = {**read_object(config, "rope_scaling"), **read_object(config, "rope_parameters")}
    kind = params.get("rope_type", params.get("type"))
    if kind not in ("dynamic", "xdrope") or not params.get("alpha"):
        return config
    width = read_int(config, "hidden_size", high=1 << 20)
    head_dim = read_heads(config, width)[2]
    if head_dim <= 2:
        refuse("head_dim", head_dim, "above 2, because the RoPE has alpha")
    theta = read_float({"rope_theta": config.get("rope_theta"), **params}, "rope_theta", 10000.0)
    theta *= read_float(params, "alpha") ** (head_dim / (head_dim - 2))
    return {**config, "rope_scaling": None, "rope_parameters": {"rope_theta": theta}}


def _attention(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's attention of h to x."""
    prefix = f"model.layers.{layer}.self_attn"
    qkv = heads_of(b, s, prefix, h)
    assert s.rope is not None, "read_decoder sets it"
    b.rotate(qkv, heads=s.q_heads + s.kv_heads, rope=s.rope)
    q_norm, k_norm = f"{prefix}.query_layernorm", f"{prefix}.key_layernorm"
    b.rope_store_kv(qkv, layer=layer, rope=None, q_norm=q_norm, k_norm=k_norm)
    b.linear(
        b.attention(qkv, layer=layer), f"{prefix}.o_proj", bias=s.out_bias, add_to=x, use="output"
    )


HunyuanDense = DecoderRow(
    "Hunyuan 0.5B to 7B: queries and keys are normalized after the RoPE."
    " Source: transformers modeling_hunyuan_v1_dense.",
    positions=2048,
    layers=partial(build_decoder, attention=_attention),
    prepare=_keys,
    defaults={"rms_norm_eps": 1e-5},
    bias=ATTENTION_BIAS,
)


def _mixture(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add to x the layer's experts of h, and the expert that all tokens share."""
    prefix = f"model.layers.{layer}.mlp"
    add_mixture(b, s, prefix, h, x, renormalize=True, router="gate.wg")
    gated_mlp(b, s, f"{prefix}.shared_mlp", h, s.intermediate, to=x)


def _number(config: Config, key: str, default: int) -> int:
    """Return config[key], an integer, or a list with the same integer for all layers."""
    value = config.get(key)
    if isinstance(value, list) and len(set(map(str, value))) == 1:
        value = value[0]
    return read_int({key: value}, key, default)


def _experts(config: Config) -> dict[str, Any]:
    width = read_int(config, "intermediate_size", high=1 << 24)
    numbers = {
        "num_experts": _number(config, "num_experts", read_int(config, "num_local_experts", 1)),
        "num_experts_per_tok": _number(config, "moe_topk", 1),
        "moe_intermediate_size": _number(config, "moe_intermediate_size", width),
    }
    if (shared_count := _number(config, "num_shared_expert", 1)) != 1:
        refuse("num_shared_expert", shared_count, "1")
    return {"parts": read_experts(numbers, count="num_experts", width="moe_intermediate_size")}


HunyuanMoe = replace(
    HunyuanDense,
    about="Hunyuan A13B: experts chosen by a softmax, and an expert that all tokens share."
    " Source: transformers modeling_hunyuan_v1_moe.",
    layers=partial(build_decoder, attention=_attention, mlp=_mixture),
    read_arguments=_experts,
)
