"""The values of the labels of a classifier, from their logits."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence


def activated(logits: Sequence[float], activation: str) -> list[float]:
    """Return the value of each label.

    activation: "softmax", "sigmoid", "tanh", "gelu" or "none".

    math.fsum makes the sums exact, so a value depends on the logits only, not on their order.
    """
    if activation == "softmax":
        most = max(logits)
        parts = [math.exp(x - most) for x in logits]
        total = math.fsum(parts)
        return [part / total for part in parts]
    return [ELEMENTWISE[activation](x) for x in logits]


def rows_of(values: array[float], count: int) -> list[list[float]]:
    """Return `values` as `count` rows of equal length, such as one for each token."""
    width = len(values) // count
    return [values[at : at + width].tolist() for at in range(0, len(values), width)]


def _sigmoid(x: float) -> float:
    small = math.exp(-abs(x))
    return (1.0 if x >= 0 else small) / (1.0 + small)


def _gelu(x: float) -> float:
    return 0.5 * x * (1.0 + math.erf(x / math.sqrt(2.0)))


def _same(x: float) -> float:
    return x


ELEMENTWISE = {"none": _same, "sigmoid": _sigmoid, "tanh": math.tanh, "gelu": _gelu}
