"""The sizes of recurrent layers: Mamba 1 and 2, WKV 6 and 7, and the factors of Falcon H1."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mamba1Sizes:
    """The sizes of Mamba 1 layers, which have a state of `state` numbers for each channel.

    rank: columns between the channels and their step sizes.
    taps: the number of tokens that the convolution covers.
    norms: "none", or norms of steps, B and C: "plain" without weights, or "weights".
    eps: the epsilon of these norms.
    """

    channels: int
    state: int
    rank: int
    taps: int
    conv_bias: bool
    proj_bias: bool
    norms: str
    eps: float


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


@dataclass(frozen=True, slots=True)
class LayerFactors:
    """The constants that multiply the parts of a layer.

    inputs: the factors of z, the values, B, C and the step sizes of Mamba2.
    gate: the factor of the gate of the MLP, before the activation.
    attention, mamba, mlp: the factors of the results that are added to the residual stream.
    """

    inputs: tuple[float, ...]
    gate: float
    attention: float
    mamba: float
    mlp: float


@dataclass(frozen=True, slots=True)
class Wkv6Sizes:
    """The sizes of layers with `wkv6`.

    A head has a state of key_width x value_width floats, and kv_heads have keys and values.
    mix_rank, decay_rank: the number of columns between a mixture of rows and the factors of
    other mixtures or the decays.
    order: the inputs of a layer in the order of their matrices.

    separate: whether the factors of each mixture are a tensor of their own.
    norm_eps: the epsilon of the norms of heads; 0 = there are none, and no bonus.
    key_bias: whether the projections of r, k and v have biases.
    """

    width: int
    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    mix_rank: int
    decay_rank: int
    order: str
    separate: bool
    norm_eps: float
    norm_bias: bool
    norm_first: bool
    key_bias: bool


@dataclass(frozen=True, slots=True)
class Wkv7Sizes:
    """The sizes of layers with `wkv7`.

    A head has a state of head_dim x value_dim floats. A rank is the number of columns between
    a mixture of rows and, of all heads, the decays, the steps ("a"), the part of the first
    layer's values ("v") or the gates ("g"; 0 = there are none).

    norm_eps: the epsilon of the norms of heads; 0 = there are none.
    """

    heads: int
    head_dim: int
    value_dim: int
    ranks: dict[str, int]
    norm_eps: float
    norm_bias: bool
    norm_first: bool
    stacked: bool
