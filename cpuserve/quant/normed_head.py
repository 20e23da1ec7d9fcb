"""The output matrix of Baichuan 2: its rows are divided by their lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cpuserve.quant import dequantize
from cpuserve.quant.base import BuiltTensor, QuantTensor
from cpuserve.quant.parts import part_of
from cpuserve.quant.stored import DENSE_KINDS

if TYPE_CHECKING:
    import numpy.typing as npt

    from cpuserve.program.weight_kinds import WeightKind
    from cpuserve.quant.base import Weights

SHORTEST = np.float32(1e-12)  # a row is divided by at least this length


class NormedHead:
    """`Weights` where each row of matrix `head` [vocab, width] has the length 1.

    Rows that have this length in the file, as in GGUF files of a model that was converted to
    Baichuan 1, stay as they are except for rounding.
    """

    def __init__(self, weights: Weights, head: str) -> None:
        """head: the name of the output matrix."""
        self._weights = weights
        self._head = head

    def names(self) -> set[str]:
        """Return the name of each tensor in the checkpoint, after renaming."""
        return self._weights.names()

    def get(self, name: str) -> QuantTensor:
        """Return the tensor; the rows of `head` are built in fp32 when they are read."""
        whole = self._weights.get(name)
        if name != self._head or len(whole.shape) != 2:
            return whole

        def build(some: slice) -> npt.NDArray[np.uint8]:
            first, end, _ = some.indices(whole.shape[0])
            values = dequantize(part_of(name, whole, slice(first, end, 1), vector=False))
            lengths = np.sqrt(np.square(values, dtype=np.float64).sum(axis=1, keepdims=True))
            normed = values / np.maximum(lengths.astype(np.float32), SHORTEST)
            return np.ascontiguousarray(normed[:: some.step]).view(np.uint8)

        size = 4 * whole.shape[0] * whole.shape[1]
        return BuiltTensor(name, whole.shape, "f32", size, build, whole.release)

    def kind(self, name: str, dtype: str) -> WeightKind:
        """Return the weight kind of the tensor; `head` is dense."""
        return DENSE_KINDS[dtype] if name == self._head else self._weights.kind(name, dtype)
