"""Falcon-H1: each layer adds attention and Mamba2 of the same input, with constant factors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cpuserve.models.config import read_bool, read_float, refuse
from cpuserve.models.llama import attend, finish_decoder, read_decoder
from cpuserve.models.mamba import read_mamba2, scan_mamba2
from cpuserve.models.parts import SpecParts
from cpuserve.models.sizes import LayerFactors
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId
from cpuserve.program.parts import rows
from cpuserve.program.program import Use


class FalconH1:
    """Falcon-H1: attention and Mamba2 side by side. Source: transformers modeling_falcon_h1."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Falcon-H1 config."""
        config = {"rms_norm_eps": 1e-5, "mamba_d_ssm": 1024, **config}
        bias = read_bool(config, "attention_bias", False)
        into = read_float(config, "attention_in_multiplier", 1.0, high=1e9)
        if bias and into != 1.0:
            refuse("attention_in_multiplier", into, "1 if attention_bias is true")
        mamba = read_mamba2(config)
        parts: SpecParts = {
            "mamba2": mamba,
            "factors": _read_factors(config, into, mamba.proj_bias),
            "mamba_norm": read_bool(config, "mamba_rms_norm", False),
            "norm_first": read_bool(config, "mamba_norm_before_gate", True),
            "mamba_bias": read_bool(config, "projectors_bias", False),
        }
        spec = read_decoder(
            config,
            positions=8192,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=read_bool(config, "mlp_bias", False),
            parts=parts,
        )
        scores = into**2 * read_float(config, "key_multiplier", 1.0)
        return replace(
            spec,
            embed_scale=read_float(config, "embedding_multiplier", 1.0),
            logit_scale=read_float(config, "lm_head_multiplier", 1.0),
            attention_scale=scores * spec.head_dim**-0.5,
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        factors = s.parts["factors"]
        x = b.embed("model.embed_tokens", scale=s.embed_scale)
        for i in range(s.layers):
            prefix = f"model.layers.{i}"
            h = b.rms_norm(x, f"{prefix}.input_layernorm")
            mixed = _mamba(b, s, f"{prefix}.mamba", h)
            bias = s.parts["mamba_bias"]
            _add(b, s, mixed, f"{prefix}.mamba.out_proj", bias, factors.mamba, x)
            a = attend(b, s, i, h)
            _add(b, s, a, f"{prefix}.self_attn.o_proj", s.out_bias, factors.attention, x, "output")
            h = b.rms_norm(x, f"{prefix}.pre_ff_layernorm")
            g = _gated(b, s, f"{prefix}.feed_forward", h)
            _add(b, s, g, f"{prefix}.feed_forward.down_proj", s.mlp_bias, factors.mlp, x, "down")
        finish_decoder(b, s, b.rms_norm(x, "model.final_layernorm"))


def _read_factors(config: Mapping[str, Any], attention_in: float, proj_bias: bool) -> LayerFactors:
    """Return the constant factors of a layer.

    attention_in: the factor of the values of attention, and therefore of its result.
    """
    gate_factor, down_factor = _read_list(config, "mlp_multipliers", 2)
    into = read_float(config, "ssm_in_multiplier", 1.0)
    if proj_bias and into != 1.0:
        refuse("ssm_in_multiplier", into, "1 if mamba_proj_bias is true")
    return LayerFactors(
        inputs=tuple(into * factor for factor in _read_list(config, "ssm_multipliers", 5)),
        gate=gate_factor,
        attention=attention_in * read_float(config, "attention_out_multiplier", 1.0),
        mamba=read_float(config, "ssm_out_multiplier", 1.0),
        mlp=down_factor,
    )


def _read_list(config: Mapping[str, Any], key: str, count: int) -> list[float]:
    values = config.get(key)
    if values is None:
        return [1.0] * count
    if not isinstance(values, list) or len(values) != count:
        refuse(key, values, f"a list of {count} numbers")
    return [read_float({key: value}, key) for value in values]


def _mamba(b: Builder, s: ModelSpec, prefix: str, h: ValueId) -> ValueId:
    """Return the gated result of Mamba2 of h, before its output matrix."""
    m = s.parts["mamba2"]
    widths = (m.width, m.width, m.groups * m.state, m.groups * m.state, m.heads)
    inputs = s.parts["factors"].inputs
    out, z = scan_mamba2(b, m, prefix, h, list(zip(widths, inputs, strict=True)))
    norm = s.parts["mamba_norm"]
    if norm and not s.parts["norm_first"]:
        return b.gated_norm(out, z, f"{prefix}.norm", groups=m.groups, eps=m.eps)
    if norm:
        group_width = m.width // m.groups
        for i in range(m.groups):
            part = rows(f"{prefix}.norm", i * group_width, group_width)
            b.part_norm(out, part, width=group_width, column=i * group_width, eps=m.eps)
    return b.activation(b.columns(z, m.width, more=out), "silu_mul")


def _gated(b: Builder, s: ModelSpec, prefix: str, h: ValueId) -> ValueId:
    """Return act(factor * gate(h)) * up(h) of the MLP."""
    factor = s.parts["factors"].gate
    gate_up, activation = [f"{prefix}.gate_proj", f"{prefix}.up_proj"], s.gated_activation
    if factor == 1.0:
        return b.linear(h, gate_up, features=s.intermediate, bias=s.mlp_bias, then=activation)
    g = b.linear(h, gate_up, features=s.intermediate, bias=s.mlp_bias)
    b.multiply_by(g, [(s.intermediate, factor), (s.intermediate, 1.0)])
    return b.activation(g, activation)


def _add(
    b: Builder,
    s: ModelSpec,
    value: ValueId,
    name: str,
    bias: bool,
    factor: float,
    x: ValueId,
    use: Use = "linear",
) -> None:
    """Add to x the product of a value and the matrix `name`, times a constant factor."""
    if not bias:
        b.multiply_by(value, factor)
        b.linear(value, name, add_to=x, use=use)
        return
    out = b.linear(value, name, features=s.width, bias=True, use=use)
    b.multiply_by(out, factor)
    b.add(out, to=x)
