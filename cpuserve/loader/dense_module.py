"""The layers after pooling: modules of sentence-transformers, and heads of classifiers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]


_erf = np.vectorize(math.erf, otypes=[np.float64])


def _gelu(x: Float64) -> Float64:
    y: Float64 = 0.5 * x * (1.0 + _erf(x / math.sqrt(2.0)))
    return y


def _sigmoid(x: Float64) -> Float64:
    # exp gets no positive argument, so that it cannot overflow.
    small = np.exp(-np.abs(x))
    y: Float64 = np.where(x < 0, small, 1.0) / (1.0 + small)
    return y


def _tanh(x: Float64) -> Float64:
    y: Float64 = np.tanh(x)
    return y


def _relu(x: Float64) -> Float64:
    y: Float64 = np.maximum(x, 0.0)
    return y


def _silu(x: Float64) -> Float64:
    return x * _sigmoid(x)


def _same(x: Float64) -> Float64:
    return x


ACTIVATIONS: dict[str, Callable[[Float64], Float64]] = {
    "none": _same,
    "tanh": _tanh,
    "gelu": _gelu,
    "sigmoid": _sigmoid,
    "relu": _relu,
    "silu": _silu,
}


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """A linear layer for a pooled vector x: activation(weight @ x + bias); weight [out, in], fp32.

    activation: a key of ACTIVATIONS, such as "tanh".
    """

    weight: Float32
    bias: Float32 | None
    activation: str

    def __call__(self, x: Float64) -> Float64:
        """Return the vector [out]; einsum adds in the same order for any number of threads."""
        y: Float64 = np.einsum("nk,k->n", self.weight, x.astype(np.float32)).astype(np.float64)
        if self.bias is not None:
            y = y + self.bias
        return ACTIVATIONS[self.activation](y)

    def width_after(self, width: int) -> int | None:
        """Return the width of the result for a vector of `width`; None if the layer fits none."""
        fits = self.weight.ndim == 2 and self.weight.shape[1] == width
        out = int(self.weight.shape[0])
        return out if fits and (self.bias is None or self.bias.shape == (out,)) else None


@dataclass(frozen=True, slots=True, eq=False)
class Residual:
    """A Dense that adds its input, or the product of `weight` and the input, to its result."""

    dense: Dense
    weight: Float32 | None

    def __call__(self, x: Float64) -> Float64:
        """Return the vector [out]."""
        return self.dense(x) + (x if self.weight is None else Dense(self.weight, None, "none")(x))

    def width_after(self, width: int) -> int | None:
        """Return the width of the result for a vector of `width`; None if the layer fits none."""
        added = (
            width if self.weight is None else Dense(self.weight, None, "none").width_after(width)
        )
        out = self.dense.width_after(width)
        return out if out == added else None


@dataclass(frozen=True, slots=True, eq=False)
class VectorNorm:
    """LayerNorm for a pooled vector; weight and bias are [width], fp32."""

    weight: Float32
    bias: Float32 | None
    eps: float

    def __call__(self, x: Float64) -> Float64:
        """Return the normalized vector [width]."""
        centred = x - np.mean(x)
        y: Float64 = centred / np.sqrt(np.mean(centred * centred) + self.eps) * self.weight
        return y if self.bias is None else y + self.bias

    def width_after(self, width: int) -> int | None:
        """Return `width`; None if the weights are for vectors of another width."""
        return width if {width} == {*self.weight.shape, *getattr(self.bias, "shape", ())} else None


@dataclass(frozen=True, slots=True)
class UnitLength:
    """Scales a vector to length 1; a vector of zeros stays as it is."""

    def __call__(self, x: Float64) -> Float64:
        """Return the scaled vector; the smallest length is the one of torch's `normalize`."""
        return x / max(float(np.sqrt(np.sum(x * x))), 1e-12)

    def width_after(self, width: int) -> int | None:
        """Return `width`."""
        return width


@dataclass(frozen=True, slots=True)
class FirstColumns:
    """Keeps the first `width` values of a vector, or all if it has fewer (truncate_dim)."""

    width: int

    def __call__(self, x: Float64) -> Float64:
        """Return these values."""
        return x[: self.width]

    def width_after(self, width: int) -> int | None:
        """Return the number of values that are kept."""
        return min(width, self.width)


@dataclass(frozen=True, slots=True)
class LargestValues:
    """Keeps the largest values of a sparse embedding, and sets all others to 0 (max_active_dims).

    Of equal values, the first ones are kept.
    """

    count: int

    def __call__(self, x: Float64) -> Float64:
        """Return the vector with at most `count` values."""
        top_columns = np.argsort(-x, kind="stable")[: self.count]
        y = np.zeros_like(x)
        y[top_columns] = x[top_columns]
        return y

    def width_after(self, width: int) -> int | None:
        """Return `width`."""
        return width


@dataclass(frozen=True, slots=True)
class Activation:
    """Applies an activation, a key of ACTIVATIONS, to a vector."""

    name: str

    def __call__(self, x: Float64) -> Float64:
        """Return the values of the function."""
        return ACTIVATIONS[self.name](x)

    def width_after(self, width: int) -> int | None:
        """Return `width`."""
        return width


Layer: TypeAlias = (
    Dense | Residual | VectorNorm | UnitLength | FirstColumns | LargestValues | Activation
)


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """How the vectors of a sequence's tokens become an embedding or a score.

    pooling: "last", "first", "mean", "max", "weighted_mean" or "sqrt_mean" of the vectors, or
      several of them joined by "+": their results follow each other in one vector;
      "all" = a result for each token; "splade" or "splade_sum" = a value for each token id,
      the maximum or the sum over all tokens; "none" for a model that generates text.
    of_tokens: the layers that are applied to the vector of each token before the pooling.
    layers: the layers that are applied to the pooled vector.
    unit: whether the result is scaled to length 1.
    weights, multi: the linears for a weight and for a vector of each token (BGE-M3).
    logs: how often SPLADE applies log(1 + x) to a logit.
    """

    pooling: str
    layers: tuple[Layer, ...] = ()
    unit: bool = True
    weights: Dense | None = None
    multi: Dense | None = None
    logs: int = 1
    of_tokens: tuple[Layer, ...] = ()

    def without_activation(self) -> Head:
        """Return the head without the activation of its last layer, a Dense or an Activation."""
        *first, last = self.layers
        if isinstance(last, Activation):
            return replace(self, layers=tuple(first))
        assert isinstance(last, Dense)
        return replace(self, layers=(*first, replace(last, activation="none")))

    def width_after(self, width: int) -> int:
        """Return the width of a result, from the width of the vector of a token.

        Raises:
            ValueError: a layer does not fit the width of its input.
        """
        after = through(self.of_tokens, width)
        return through(self.layers, after * (1 + self.pooling.count("+")))


def through(layers: Sequence[Layer], width: int) -> int:
    """Return the width of a vector of `width` after `layers`; ValueError if one does not fit."""
    for layer in layers:
        width_after = layer.width_after(width)
        if width_after is None:
            msg = f"a layer ({type(layer).__name__}) does not fit the {width} numbers that it gets"
            raise ValueError(msg)
        width = width_after
    return width
