"""Mamba 1 and 2, and the Mamba layers of hybrid models: their sizes and their operations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cpuserve.models.config import (
    read_bool,
    read_choice,
    read_dtype,
    read_float,
    read_ids,
    read_int,
    read_taps,
    refuse,
)
from cpuserve.models.llama import finish_decoder
from cpuserve.models.sizes import Mamba1Sizes, Mamba2Sizes
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId
from cpuserve.program.parts import rows

# States have the same size at any length. Trained lengths are in no config, and the memory for the
# ids of a sequence has to be bounded.
MOST_TOKENS = 131072


def read_mamba2(config: Mapping[str, Any]) -> Mamba2Sizes:
    """Return the sizes of Mamba2 in a config with the keys of Bamba and Granite 4.

    The width of all heads is mamba_d_ssm (Falcon-H1), or else mamba_expand x hidden_size.
    """
    width = read_int(config, "hidden_size", high=1 << 20)
    channels = read_int(config, "mamba_expand", 2, high=64) * width
    formula = "mamba_expand x hidden_size"
    if config.get("mamba_d_ssm") is not None:
        channels, formula = read_int(config, "mamba_d_ssm", high=1 << 20), "mamba_d_ssm"
    heads = read_int(config, "mamba_n_heads", 128, high=65536)
    if channels % heads:
        refuse("mamba_n_heads", heads, f"a divisor of {formula} ({channels})")
    head_dim = config.get("mamba_d_head")
    if head_dim not in (None, "auto", channels // heads):
        refuse(
            "mamba_d_head",
            head_dim,
            f"{channels // heads}: {formula}, for each of mamba_n_heads",
        )
    groups = read_int(config, "mamba_n_groups", 1, high=65536)
    if heads % groups:
        refuse("mamba_n_groups", groups, f"a divisor of mamba_n_heads ({heads})")
    # The convolution is followed by SiLU; other activations are refused.
    read_choice(config, "hidden_act", "silu", {"silu": "silu", "swish": "silu"})
    return Mamba2Sizes(
        heads=heads,
        head_dim=channels // heads,
        groups=groups,
        state=read_int(config, "mamba_d_state", 256, high=65536),
        taps=read_taps(config, "mamba_d_conv", 4),
        eps=read_float(config, "rms_norm_eps", 1e-6),
        conv_bias=read_bool(config, "mamba_conv_bias", True),
        proj_bias=read_bool(config, "mamba_proj_bias", False),
        limits=_read_limits(config),
    )


def _read_limits(config: Mapping[str, Any]) -> tuple[float, float]:
    key = "time_step_limit"
    limits = config.get(key)
    if limits is None:
        return 0.0, math.inf
    numbers = isinstance(limits, list | tuple) and all(type(x) in (int, float) for x in limits)
    if not numbers or len(limits) != 2 or not 0 <= limits[0] <= limits[1]:
        refuse(key, limits, "two numbers from 0 on, in ascending order")
    return float(limits[0]), float(limits[1])


def add_mamba2(b: Builder, s: Mamba2Sizes, prefix: str, h: ValueId, x: ValueId) -> None:
    """Add the Mamba2 layer `prefix` (the name of its module) of h to x."""
    out, inputs = scan_mamba2(b, s, prefix, h)
    normed = b.gated_norm(out, inputs, f"{prefix}.norm", groups=s.groups, eps=s.eps)
    b.linear(normed, f"{prefix}.out_proj", bias=s.proj_bias, add_to=x)


def mamba2_layer(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's Mamba2 of h to x."""
    add_mamba2(b, s.parts["mamba2"], f"model.layers.{layer}.mamba", h, x)


def scan_mamba2(
    b: Builder, s: Mamba2Sizes, prefix: str, h: ValueId, factors: Sequence[tuple[int, float]] = ()
) -> tuple[ValueId, ValueId]:
    """Return (output of the state space model, inputs) of the Mamba2 layer `prefix` of h.

    The inputs are in_proj(h): z, which gates the output, then the channels, then the step sizes.

    factors: (columns, factor) of each part of the inputs; by default all factors are 1.
    """
    widths = s.width, s.channels, s.heads
    inputs = b.linear(h, f"{prefix}.in_proj", features=sum(widths), bias=s.proj_bias)
    if factors:
        b.multiply_by(inputs, factors)
    mixed = b.short_conv(
        inputs,
        f"{prefix}.conv1d",
        taps=s.taps,
        column=s.width,
        channels=s.channels,
        bias=s.conv_bias,
        silu=True,
    )
    out = b.mamba2(
        mixed,
        inputs,
        prefix,
        heads=s.heads,
        groups=s.groups,
        key_width=s.state,
        value_width=s.head_dim,
        column=s.width + s.channels,
        limits=s.limits,
    )
    return out, inputs


def read_mamba1(
    config: Mapping[str, Any], names: Mapping[str, str], norms: str, eps: float
) -> Mamba1Sizes:
    """Return the sizes of Mamba 1; names: the keys of this config by the keys of Mamba."""
    width = read_int(config, "hidden_size", high=1 << 20)
    rank = names.get("time_step_rank", "time_step_rank")
    auto = config.get(rank) in (None, "auto")
    read_choice(config, "hidden_act", "silu", {"silu": "silu", "swish": "silu"})
    return Mamba1Sizes(
        channels=read_int(config, names.get("expand", "expand"), 2, high=64) * width,
        state=read_int(config, names.get("state_size", "state_size"), 16, high=65536),
        rank=-(-width // 16) if auto else read_int(config, rank, high=1 << 20),
        taps=read_taps(config, names.get("conv_kernel", "conv_kernel"), 4),
        conv_bias=read_bool(config, names.get("use_conv_bias", "use_conv_bias"), True),
        proj_bias=read_bool(config, names.get("use_bias", "use_bias"), False),
        norms=norms,
        eps=eps,
    )


def add_mamba1(b: Builder, s: Mamba1Sizes, prefix: str, h: ValueId, x: ValueId) -> None:
    """Add the Mamba 1 layer `prefix` (the name of its module) of h to x."""
    inputs = b.linear(h, f"{prefix}.in_proj", features=2 * s.channels, bias=s.proj_bias)
    mixed = b.short_conv(
        inputs, f"{prefix}.conv1d", taps=s.taps, channels=s.channels, bias=s.conv_bias, silu=True
    )
    parts, begin = [], 0
    for name, width in (("dt", s.rank), ("b", s.state), ("c", s.state)):
        part = b.linear(mixed, rows(f"{prefix}.x_proj", begin, width), features=width)
        if s.norms != "none":
            weightless = s.norms == "plain"
            part = b.rms_norm(part, f"{prefix}.{name}_layernorm", eps=s.eps, weightless=weightless)
        parts.append(part)
        begin += width
    low, keys, queries = parts
    steps = b.linear(low, f"{prefix}.dt_proj", features=s.channels, bias=True)
    out = b.selective_scan(mixed, steps, keys, queries, inputs, prefix, column=s.channels)
    b.linear(out, f"{prefix}.out_proj", bias=s.proj_bias, add_to=x)


def _states_alone(config: Mapping[str, Any], sizes: Mamba1Sizes | Mamba2Sizes) -> ModelSpec:
    """Return the hyperparameters of a model without attention; no layer limits the length."""
    vocab = read_int(config, "vocab_size")
    # Half of the values of a token in a layer: Mamba 1 has five of all channels, and Mamba2 two of
    # all columns of its convolution and two of its gates.
    if isinstance(sizes, Mamba1Sizes):
        half = 5 * sizes.channels // 2
    else:
        half = sizes.width + sizes.channels
    return ModelSpec(
        vocab=vocab,
        width=read_int(config, "hidden_size", high=1 << 20),
        layers=read_int(config, "num_hidden_layers", high=4096),
        q_heads=0,
        kv_heads=0,
        head_dim=0,
        intermediate=half,
        max_position=MOST_TOKENS,
        norm_eps=read_float(config, "layer_norm_epsilon", 1e-5),
        tied=read_bool(config, "tie_word_embeddings", isinstance(sizes, Mamba1Sizes)),
        dtype=read_dtype(config),
        bos_ids=read_ids(config, "bos_token_id", vocab),
        eos_ids=read_ids(config, "eos_token_id", vocab),
        parts={"mamba1": sizes} if isinstance(sizes, Mamba1Sizes) else {"mamba2": sizes},
    )


def _read_channels(config: Mapping[str, Any], norms: str, eps: float) -> Mamba1Sizes:
    """Return the sizes in a config of Mamba 1 alone, where intermediate_size counts the channels.

    It counts before `expand`, which is another number in the config of Falcon Mamba 7B. GGUF files
    have 0 instead.
    """
    sizes = read_mamba1(config, {}, norms, eps)
    value = config.get("intermediate_size") or sizes.channels
    channels = read_int({"intermediate_size": value}, "intermediate_size", high=1 << 24)
    return replace(sizes, channels=channels)


class MambaModel:
    """Mamba 1 130M to 2.8B: no attention. Source: transformers modeling_mamba."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Mamba config."""
        return _states_alone(config, _read_channels(config, "none", 0.0))

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        x = b.embed("model.embeddings")
        for i in range(s.layers):
            prefix = f"model.layers.{i}"
            h = b.rms_norm(x, f"{prefix}.norm")
            if "mamba1" in s.parts:
                add_mamba1(b, s.parts["mamba1"], f"{prefix}.mixer", h, x)
            else:
                add_mamba2(b, s.parts["mamba2"], f"{prefix}.mixer", h, x)
        finish_decoder(b, s, b.rms_norm(x, "model.norm_f"), embedding="model.embeddings")


class FalconMamba(MambaModel):
    """Falcon Mamba 7B: Mamba 1 with norms of steps, B and C. Source: modeling_falcon_mamba."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Falcon Mamba config."""
        eps = read_float(config, "mixer_rms_eps", 1e-6)
        return _states_alone(config, _read_channels(config, "plain", eps))


class Mamba2Model(MambaModel):
    """Mamba 2 130M to 2.7B and Codestral Mamba: no attention. Source: modeling_mamba2."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Mamba2 config."""
        width = read_int(config, "hidden_size", high=1 << 20)
        heads = read_int(config, "num_heads", high=65536)
        groups = read_int(config, "n_groups", 8, high=65536)
        if heads % groups:
            refuse("n_groups", groups, f"a divisor of num_heads ({heads})")
        head_dim = read_int(config, "head_dim", 64, high=65536)
        channels = read_int(config, "expand", 2, high=64) * width
        if heads * head_dim != channels:
            refuse("num_heads", heads, f"expand x hidden_size ({channels}) / head_dim ({head_dim})")
        read_choice(config, "hidden_act", "silu", {"silu": "silu", "swish": "silu"})
        sizes = Mamba2Sizes(
            heads=heads,
            head_dim=head_dim,
            groups=groups,
            state=read_int(config, "state_size", high=65536),
            taps=read_taps(config, "conv_kernel", 4),
            eps=read_float(config, "layer_norm_epsilon", 1e-5),
            conv_bias=read_bool(config, "use_conv_bias", True),
            proj_bias=read_bool(config, "use_bias", False),
            limits=_read_limits(config),
        )
        return _states_alone(config, sizes)
