"""Tensors with one row for text and one for pictures (ERNIE 4.5 VL): only the first is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpuserve.quant.parts import part_of

if TYPE_CHECKING:
    from cpuserve.program.weight_kinds import WeightKind
    from cpuserve.quant.base import QuantTensor, Weights


class FirstRows:
    """`Weights` where the matrices that are called `*end` have only their first row."""

    def __init__(self, weights: Weights, end: str) -> None:
        """Wrap the weights of a checkpoint."""
        self._weights = weights
        self._end = end

    def names(self) -> set[str]:
        """Return the name of each tensor in the checkpoint, after renaming."""
        return self._weights.names()

    def get(self, name: str) -> QuantTensor:
        """Return the tensor; of such a matrix [rows, n] its first row [1, n]."""
        whole = self._weights.get(name)
        if not name.endswith(self._end) or len(whole.shape) != 2:
            return whole
        return part_of(name, whole, slice(0, 1), vector=False)

    def kind(self, name: str, dtype: str) -> WeightKind:
        """Return the weight kind of a matrix."""
        return self._weights.kind(name, dtype)
