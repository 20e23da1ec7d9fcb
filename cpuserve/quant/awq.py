"""AWQ checkpoints ("gemm" packing): 4 bits, one scale and one zero point per group of inputs.

qweight int32 [k, n / 8], qzeros int32 [groups, n / 8], scales fp16 [groups, n]; w = s (q - z). The
eight outputs of an int32 word are stored in the order 0 2 4 6 1 3 5 7, lowest bits first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cpuserve.quant.packed import (
    PackedWeights,
    RebuiltTensor,
    expect,
    floats,
    pair_up,
    unpack,
    words,
)
from cpuserve.quant.registry import weight_format
from cpuserve.quant.rows import int4_rows

if TYPE_CHECKING:
    import numpy.typing as npt

    from cpuserve.quant.base import SourceType, Weights
    from cpuserve.quant.stored import StoredTensor, TensorStore

ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # nibble of outputs 0 .. 7 within a word


@weight_format("awq")
def awq_weights(store: TensorStore, config: dict[str, Any]) -> Weights:
    """Weights of an AWQ checkpoint; ModelError unless it has 4 bits in "gemm" packing."""
    settings = config.get("quantization_config") or {}
    expect(settings, "an AWQ", bits=4, version="gemm")
    return AwqWeights(store)


class AwqWeights(PackedWeights):
    """Weights whose matrices are stored as qweight, qzeros and scales."""

    leader, leader_dtype = "qweight", "I32"
    parts = ("qweight", "qzeros", "scales")

    def source(self, stem: str) -> SourceType:
        """The source type of 4-bit codes with a scale and a minimum per group."""
        del stem
        return "u4m_g128"

    def rebuild(self, name: str, stem: str) -> RebuiltTensor:
        """The matrix with one row per output, from tensors with one column per output."""
        k, packed = self.part(stem, "qweight").shape

        def build() -> npt.NDArray[np.uint8]:
            codes = outputs(self.part(stem, "qweight"))
            scale = floats(self.part(stem, "scales"))
            zero = outputs(self.part(stem, "qzeros")).astype(np.float32)
            return int4_rows(pair_up(codes.T), scale.T, (-zero * scale).T, name)

        return RebuiltTensor(name, (packed * 8, k), "u4m_g128", build, self.release(stem))


def outputs(tensor: StoredTensor) -> npt.NDArray[np.uint8]:
    """4-bit codes [rows, n] from words [rows, n / 8] in AWQ's order."""
    codes = unpack(words(tensor))
    return codes.reshape(len(codes), -1, 8)[:, :, ORDER].reshape(len(codes), -1)
