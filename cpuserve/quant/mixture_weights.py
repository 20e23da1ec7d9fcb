"""The weights of RWKV 6, as its Program reads them.

A layer makes the factors of five mixtures of rows, each by a small matrix and a fixed row.
flash-linear-attention has the small matrices side by side, as columns of a matrix [width, 5 ranks].
A Program reads them as matrices of a stack [5, width, rank], as they are in GGUF files.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from cpuserve.quant import dequantize
from cpuserve.quant.base import QuantTensor
from cpuserve.quant.stored import DENSE_KINDS

if TYPE_CHECKING:
    from cpuserve.program.weight_kinds import WeightKind
    from cpuserve.quant.base import Weights

MATRICES = ".attn.x_proj.2.weight"
ROWS = ".attn.x_proj.2.bias"
ROWS_STORED = ".attn.x_bias"
COUNT = 5  # of mixtures


class MixtureWeights:
    """The `Weights` of an RWKV 6 checkpoint, as its Program reads them."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._stored = {name.replace(ROWS_STORED, ROWS): name for name in weights.names()}

    def names(self) -> set[str]:
        """Return the name of each tensor, with the names of the Program for fixed rows."""
        return set(self._stored)

    def get(self, name: str) -> QuantTensor:
        """Return the tensor; matrices that are side by side are stacked in fp32."""
        whole = self._weights.get(self._stored.get(name, name))
        if name.endswith(ROWS):
            return replace(whole, name=name)
        if not name.endswith(MATRICES) or len(whole.shape) != 2 or whole.shape[1] % COUNT:
            return whole
        width, ranks = whole.shape
        stack = dequantize(whole).reshape(width, COUNT, ranks // COUNT).transpose(1, 0, 2)
        data = np.ascontiguousarray(stack).reshape(COUNT * width, -1).view("u1")
        return QuantTensor(name, stack.shape, "f32", data, release=whole.release)

    def kind(self, name: str, dtype: str) -> WeightKind:
        """Return the weight kind of the tensor; matrices of mixtures are dense."""
        mixes = ".attn.x_proj.2" in name
        return DENSE_KINDS[dtype] if mixes else self._weights.kind(name, dtype)
