"""Source types for quantized checkpoints other than GGUF (csrc/kernels/table.h: SourceType).

s8_channel  { fp32 scale; s8 q[k] }                          w = scale * q
u4m_g128    k / 128 of { fp16 scale; fp16 min; u8 q[64] }    w = scale * q + min; element 2 i of a
            block is the low and 2 i + 1 the high nibble of byte i
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cpuserve.errors import ModelError
from cpuserve.quant.codes import GROUP, ZERO, Codes

if TYPE_CHECKING:
    import numpy.typing as npt

    from cpuserve.quant.base import QuantTensor

    Float32 = npt.NDArray[np.float32]
    Bytes = npt.NDArray[np.uint8]

SOURCES = ("s8_channel", "u4m_g128")
BLOCK_BYTES = 4 + GROUP // 2


def int8_rows(q: npt.NDArray[np.int8], scale: Float32) -> Bytes:
    """Rows of type s8_channel [n, 4 + k] from codes q [n, k] and one scale per row."""
    n, k = q.shape
    out = np.empty((n, 4 + k), np.uint8)
    out[:, :4] = scale.astype("<f4").reshape(n, 1).view(np.uint8)
    out[:, 4:] = q.view(np.uint8)
    return out


def int4_rows(nibbles: Bytes, scale: Float32, minimum: Float32, name: str) -> Bytes:
    """Rows of type u4m_g128 from packed nibbles [n, k / 2] and scale, minimum [n, groups].

    The group size must be a multiple of 128 that divides k; larger groups repeat their scale.

    Raises:
        ModelError: the group size is not a multiple of 128.
    """
    n, half = nibbles.shape
    k, groups = 2 * half, scale.shape[1]
    if k % GROUP or (k // GROUP) % groups:
        msg = (
            f"{name}: {k} inputs in {groups} groups; 4-bit groups must be multiples of {GROUP} "
            f"(re-quantize with group size {GROUP}, or use the unquantized checkpoint)"
        )
        raise ModelError(msg)
    blocks = np.empty((n, k // GROUP, BLOCK_BYTES), np.uint8)
    each = k // GROUP // groups
    for at, values in ((0, scale), (2, minimum)):
        halves = np.repeat(values.astype("<f2"), each, axis=1)
        blocks[:, :, at : at + 2] = halves[..., None].view(np.uint8)
    blocks[:, :, 4:] = nibbles.reshape(n, k // GROUP, GROUP // 2)
    return blocks.reshape(n, -1)


def read_codes(tensor: QuantTensor) -> Codes:
    """Codes and scales of a tensor of one of these types, with row_order applied."""
    data = tensor.data if tensor.row_order is None else tensor.data[tensor.row_order]
    data = np.ascontiguousarray(data)
    if tensor.source == "s8_channel":
        scale = np.ascontiguousarray(data[:, :4]).view("<f4").astype(np.float32)
        return Codes(data[:, 4:] ^ np.uint8(ZERO), scale, None, data.shape[1] - 4)
    blocks = data.reshape(len(data), -1, BLOCK_BYTES)
    halves = np.ascontiguousarray(blocks[:, :, :4]).view("<f2").astype(np.float32)
    packed = blocks[:, :, 4:]
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(data), -1)
    return Codes(codes, halves[:, :, 0].copy(), halves[:, :, 1].copy(), GROUP)


def dequantize(tensor: QuantTensor) -> Float32:
    """An fp32 copy of the tensor, of `tensor.shape`."""
    return read_codes(tensor).values().reshape(tensor.shape)
