"""Mamba2, and the Mamba2 layers of hybrid models: their sizes in config.json, their operations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

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
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId

# States have the same size at any length. Trained lengths are in no config, and the memory for the
# ids of a sequence has to be bounded.
MOST_TOKENS = 131072


@dataclass(frozen=True, slots=True)
class Mamba2Sizes:
    """The sizes of Mamba2 layers.

    A head has a state of `state` x `head_dim` floats.
    The heads form `groups` groups; all heads of a group use the same B and C.

    taps: the number of tokens that the convolution covers.

    limits: the smallest and the largest step size dt.
    eps: the epsilon of the gated norm.
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    taps: int
    eps: float
    conv_bias: bool
    proj_bias: bool
    limits: tuple[float, float]

    @property
    def width(self) -> int:
        """Return the number of columns of the values of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Return the number of channels of the convolution: the values, B and C."""
        return self.width + 2 * self.groups * self.state


def read_mamba2(config: Mapping[str, Any]) -> Mamba2Sizes:
    """Return the sizes of Mamba2 in a config with the keys of Bamba and Granite 4.

    The width of all heads is mamba_d_ssm (Falcon-H1), or else mamba_expand x hidden_size.
    """
    width = read_int(config, "hidden_size", high=1 << 20)
    inner, of = read_int(config, "mamba_expand", 2, high=64) * width, "mamba_expand x hidden_size"
    if config.get("mamba_d_ssm") is not None:
        inner, of = read_int(config, "mamba_d_ssm", high=1 << 20), "mamba_d_ssm"
    heads = read_int(config, "mamba_n_heads", 128, high=65536)
    if inner % heads:
        refuse("mamba_n_heads", heads, f"a divisor of {of} ({inner})")
    head_dim = config.get("mamba_d_head")
    if head_dim not in (None, "auto", inner // heads):
        refuse("mamba_d_head", head_dim, f"{inner // heads}: {of}, for each of mamba_n_heads")
    groups = read_int(config, "mamba_n_groups", 1, high=65536)
    if heads % groups:
        refuse("mamba_n_groups", groups, f"a divisor of mamba_n_heads ({heads})")
    # The convolution is followed by SiLU; other activations are refused.
    read_choice(config, "hidden_act", "silu", {"silu": "silu", "swish": "silu"})
    return Mamba2Sizes(
        heads=heads,
        head_dim=inner // heads,
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


def add_mamba2(b: Builder, s: Mamba2Sizes, at: str, h: ValueId, x: ValueId) -> None:
    """Add the Mamba2 layer `at` (the name of its module) of h to x."""
    out, inputs = scan_mamba2(b, s, at, h)
    normed = b.gated_norm(out, inputs, f"{at}.norm", groups=s.groups, eps=s.eps)
    b.linear(normed, f"{at}.out_proj", bias=s.proj_bias, add_to=x)


def scan_mamba2(
    b: Builder, s: Mamba2Sizes, at: str, h: ValueId, factors: Sequence[tuple[int, float]] = ()
) -> tuple[ValueId, ValueId]:
    """Return (output of the state space model, inputs) of the Mamba2 layer `at` of h.

    The inputs are in_proj(h): z, which gates the output, then the channels, then the step sizes.

    factors: (columns, factor) of each part of the inputs; by default all factors are 1.
    """
    widths = s.width, s.channels, s.heads
    inputs = b.linear(h, f"{at}.in_proj", features=sum(widths), bias=s.proj_bias)
    if factors:
        b.multiply_by(inputs, factors)
    mixed = b.short_conv(
        inputs,
        f"{at}.conv1d",
        taps=s.taps,
        column=s.width,
        channels=s.channels,
        bias=s.conv_bias,
        silu=True,
    )
    out = b.mamba2(
        mixed,
        inputs,
        at,
        heads=s.heads,
        groups=s.groups,
        key_width=s.state,
        value_width=s.head_dim,
        column=s.width + s.channels,
        limits=s.limits,
    )
    return out, inputs


class Mamba2Model:
    """Mamba 2 130M to 2.7B and Codestral Mamba: no attention. Source: modeling_mamba2."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Mamba2 config; no layer limits the length."""
        vocab = read_int(config, "vocab_size")
        width = read_int(config, "hidden_size", high=1 << 20)
        heads = read_int(config, "num_heads", high=65536)
        groups = read_int(config, "n_groups", 8, high=65536)
        if heads % groups:
            refuse("n_groups", groups, f"a divisor of num_heads ({heads})")
        head_dim = read_int(config, "head_dim", 64, high=65536)
        inner = read_int(config, "expand", 2, high=64) * width
        if heads * head_dim != inner:
            refuse("num_heads", heads, f"expand x hidden_size ({inner}) / head_dim ({head_dim})")
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
        return ModelSpec(
            vocab=vocab,
            width=width,
            layers=read_int(config, "num_hidden_layers", high=4096),
            q_heads=0,
            kv_heads=0,
            head_dim=0,
            intermediate=sizes.width + sizes.channels,
            max_position=MOST_TOKENS,
            norm_eps=sizes.eps,
            tied=read_bool(config, "tie_word_embeddings", False),
            dtype=read_dtype(config),
            bos_ids=read_ids(config, "bos_token_id", vocab),
            eos_ids=read_ids(config, "eos_token_id", vocab),
            extra={"mamba": sizes},
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        x = b.embed("model.embeddings")
        for i in range(s.layers):
            at = f"model.layers.{i}"
            h = b.rms_norm(x, f"{at}.norm")
            add_mamba2(b, cast("Mamba2Sizes", s.extra["mamba"]), f"{at}.mixer", h, x)
        finish_decoder(b, s, b.rms_norm(x, "model.norm_f"), embedding="model.embeddings")
