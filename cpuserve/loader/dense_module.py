"""The layers after pooling: modules of sentence-transformers, and heads of classifiers."""

from __future__ import annotations

import math
from collections.abc import Callable
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


def _same(x: Float64) -> Float64:
    return x


ACTIVATIONS: dict[str, Callable[[Float64], Float64]] = {
    "none": _same,
    "tanh": _tanh,
    "gelu": _gelu,
    "sigmoid": _sigmoid,
    "relu": _relu,
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


Layer: TypeAlias = Dense | VectorNorm


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """How the vectors of a sequence's tokens become an embedding or a score.

    pooling: "last", "first" or "mean" of the vectors;
      "all" = a result for each token; "splade" or "splade_sum" = a value for each token id,
      the maximum or the sum over all tokens; "none" for a model that generates text.
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

    def without_activation(self) -> Head:
        """Return the head without the activation of its last layer, which must be a Dense."""
        *first, last = self.layers
        assert isinstance(last, Dense)
        return replace(self, layers=(*first, replace(last, activation="none")))
