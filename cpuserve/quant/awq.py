"""AWQ checkpoints ("gemm" packing): 4 bits, one scale and one zero point per group of inputs.

qweight int32 [k, n / 8], qzeros int32 [groups, n / 8], scales fp16 [groups, n]; w = s (q - z). The
eight outputs of an int32 word are stored in the order 0 2 4 6 1 3 5 7, lowest bits first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cpuserve.quant.packed import IntWeights, expect, floats, unpack, words
from cpuserve.quant.registry import weight_format
from cpuserve.quant.rows import join_bits

if TYPE_CHECKING:
    import numpy.typing as npt

    from cpuserve.quant.base import Weights
    from cpuserve.quant.stored import StoredTensor, TensorStore

ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # nibble of outputs 0 .. 7 within a word


@weight_format("awq")
def awq_weights(store: TensorStore, config: dict[str, Any]) -> Weights:
    """Weights of an AWQ checkpoint; ModelError unless it has 4 bits in "gemm" packing."""
    settings = config.get("quantization_config") or {}
    expect(settings, "an AWQ", bits=4, version="gemm")
    return AwqWeights(store)


class AwqWeights(IntWeights):
    """Weights whose matrices are stored as qweight, qzeros and scales, a column for each output."""

    leaders = (("qweight", "I32"),)
    parts = ("qweight", "qzeros", "scales")

    def layout(self, stem: str) -> tuple[int, int, int]:
        """(outputs, inputs, groups of inputs) of a matrix."""
        k, packed = self.part(stem, "qweight").shape
        return packed * 8, k, self.part(stem, "scales").shape[0]

    def packed(self, stem: str) -> npt.NDArray[np.uint8]:
        """The codes [n, k / 2]."""
        return join_bits(outputs(self.part(stem, "qweight")).T, 4)

    def scale(self, stem: str) -> npt.NDArray[np.float32]:
        """The scales [n, groups]."""
        return floats(self.part(stem, "scales")).T

    def zero(self, stem: str) -> npt.NDArray[np.float32]:
        """The zero points [n, groups]."""
        return outputs(self.part(stem, "qzeros")).T.astype(np.float32)


def outputs(tensor: StoredTensor) -> npt.NDArray[np.uint8]:
    """4-bit codes [rows, n] from words [rows, n / 8] in AWQ's order."""
    codes = unpack(words(tensor))
    return codes.reshape(len(codes), -1, 8)[:, :, ORDER].reshape(len(codes), -1)
