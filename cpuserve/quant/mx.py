"""MX matrices of FP8 and FP6 codes, which no kernel multiplies: they become int8.

A matrix of n outputs and k inputs has scales uint8 [n, k / 32], and w = 2^(scale - 127) * value.
FP8 is E4M3 or E5M2, one byte a code. FP6 is E2M3 or E3M2: bytes [n, 3 * k / 4], four codes in three
bytes, the lowest bits first. Source: OCP Microscaling Formats 1.0, section 5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpuserve.base.errors import ModelError
from cpuserve.quant.float_rows import MX_TYPES, mx_values
from cpuserve.quant.fp8 import matrix_shape
from cpuserve.quant.rows import SMALL, spread_bits

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from cpuserve.quant.base import BuiltTensor
    from cpuserve.quant.packed import PackedWeights

    Float32 = npt.NDArray[np.float32]


def mx_matrix(
    weights: PackedWeights, name: str, stem: str, codes: str, element: str
) -> BuiltTensor:
    """Return an MX matrix in fp32, which packing converts to int8.

    codes: the suffix of the tensor with the codes; the scales are in weight_scale.
    element: the type of the values, a key of MX_TYPES.

    Raises:
        ModelError: the codes and scales do not fit each other.
    """
    stored, scales = weights.part(stem, codes), weights.part(stem, "weight_scale")
    n, width = matrix_shape(stored)
    bits, table = MX_TYPES[element]
    k = width * 8 // bits
    powers = scales.dtype in ("U8", "F8_E8M0")
    if not powers or k % SMALL or width * 8 % bits or scales.shape != (n, k // SMALL):
        msg = (
            f"{stored.name} is {[n, width]} with scales {scales.dtype} {list(scales.shape)}, which "
            f"must be one for {SMALL} inputs of an output; convert the checkpoint again"
        )
        raise ModelError(msg)

    def values(rows: slice) -> Float32:
        found = spread_bits(stored.data.reshape(n, width)[rows], bits)
        return mx_values(table[found], scales.data.reshape(n, -1)[rows])

    return weights.converted(name, stem, (n, k), values, f"MX scales of FP{bits} codes")
