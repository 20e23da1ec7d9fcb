"""Hunyuan V1, dense and mixtures: norms of queries and keys that follow the RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.models.config import read_bool, read_float, read_heads, read_int, read_object, refuse
from cpuserve.models.experts import add_mixture, read_experts
from cpuserve.models.llama import LayerPart, build_decoder, dense_mlp, gated_mlp, read_decoder
from cpuserve.models.parts import SpecParts
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId


class HunyuanDense:
    """Hunyuan 0.5B to 7B: queries and keys are normalized after the RoPE.

    Source: transformers modeling_hunyuan_v1_dense.
    """

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Hunyuan config."""
        return _spec(config, {})

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        _build(b, s, dense_mlp)


class HunyuanMoe:
    """Hunyuan A13B: experts chosen by a softmax, and an expert that all tokens share.

    Source: transformers modeling_hunyuan_v1_moe.
    """

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Hunyuan config, where numbers of experts may be lists."""
        width = read_int(config, "intermediate_size", high=1 << 24)
        numbers = {
            "num_experts": _number(config, "num_experts", read_int(config, "num_local_experts", 1)),
            "num_experts_per_tok": _number(config, "moe_topk", 1),
            "moe_intermediate_size": _number(config, "moe_intermediate_size", width),
        }
        if (shared := _number(config, "num_shared_expert", 1)) != 1:
            refuse("num_shared_expert", shared, "1")
        parts = read_experts(numbers, count="num_experts", width="moe_intermediate_size")
        return _spec(config, parts)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        _build(b, s, _mixture)


def _number(config: Mapping[str, Any], key: str, default: int) -> int:
    """Return config[key], an integer, or a list with the same integer for all layers."""
    value = config.get(key)
    if isinstance(value, list) and len(set(map(str, value))) == 1:
        value = value[0]
    return read_int({key: value}, key, default)


def _spec(config: Mapping[str, Any], parts: SpecParts) -> ModelSpec:
    if read_bool(config, "use_cla", False):
        refuse("use_cla", True, "false: keys and values shared by layers are not supported")
    if not read_bool(config, "use_qk_norm", True):
        refuse("use_qk_norm", False, "true, as transformers has these models")
    if config.get("head_dim") is None and config.get("attention_head_dim") is not None:
        config = {**config, "head_dim": config["attention_head_dim"]}
    bias = read_bool(config, "attention_bias", False)
    return read_decoder(
        _with_alpha({"rms_norm_eps": 1e-5, **config}),
        positions=2048,
        qkv_bias=bias,
        out_bias=bias,
        parts=parts,
    )


def _with_alpha(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config, where `alpha` of a "dynamic" RoPE has become a factor of its base.

    In Hunyuan OCR such a RoPE is called "xdrope".
    """
    given = {**read_object(config, "rope_scaling"), **read_object(config, "rope_parameters")}
    kind = given.get("rope_type", given.get("type"))
    if kind not in ("dynamic", "xdrope") or not given.get("alpha"):
        return config
    width = read_int(config, "hidden_size", high=1 << 20)
    head_dim = read_heads(config, width)[2]
    theta = read_float({"rope_theta": config.get("rope_theta"), **given}, "rope_theta", 10000.0)
    theta *= read_float(given, "alpha") ** (head_dim / (head_dim - 2))
    return {**config, "rope_scaling": None, "rope_parameters": {"rope_theta": theta}}


def _build(b: Builder, s: ModelSpec, mlp: LayerPart) -> None:
    build_decoder(b, s, attention=_attention, mlp=mlp)


def _attention(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    at = f"model.layers.{layer}.self_attn"
    heads = {"q_proj": s.q_heads, "k_proj": s.kv_heads, "v_proj": s.kv_heads}
    names, features = [f"{at}.{name}" for name in heads], [n * s.head_dim for n in heads.values()]
    qkv = b.linear(h, names, features=features, bias=s.qkv_bias, use="qkv")
    assert s.rope is not None, "read_decoder sets it"
    b.rotate(qkv, heads=s.q_heads + s.kv_heads, rope=s.rope)
    q_norm, k_norm = f"{at}.query_layernorm", f"{at}.key_layernorm"
    b.rope_store_kv(qkv, layer=layer, rope=None, q_norm=q_norm, k_norm=k_norm)
    b.linear(b.attention(qkv, layer=layer), f"{at}.o_proj", bias=s.out_bias, add_to=x, use="output")


def _mixture(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add to x the layer's experts of h, and the expert that all tokens share."""
    at = f"model.layers.{layer}.mlp"
    parts = ("gate_proj", "up_proj", "down_proj")
    add_mixture(b, s, at, h, x, parts=parts, renormalize=True, router="gate.wg")
    gated_mlp(b, s, f"{at}.shared_mlp", h, s.intermediate, to=x)
