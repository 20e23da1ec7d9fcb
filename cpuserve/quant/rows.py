"""Rows of source types for quantized checkpoints other than GGUF (table.h: SourceType).

s8_channel  { fp32 scale; s8 q[k] }                          w = scale * q
u4m_g128    k / 128 of { fp16 scale; fp16 min; u8 q[64] }    w = scale * q + min; element 2 i of a
            block is the low and 2 i + 1 the high nibble of byte i

Matrices with smaller groups than 128 become blocks of GGUF, which have 32 weights each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cpuserve.errors import ModelError
from cpuserve.quant.codes import GROUP, ZERO, Codes

if TYPE_CHECKING:
    import numpy.typing as npt

    from cpuserve.quant.base import QuantTensor, SourceType

    Float32 = npt.NDArray[np.float32]
    Bytes = npt.NDArray[np.uint8]

SOURCES = ("s8_channel", "u4m_g128")
BLOCK_BYTES = 4 + GROUP // 2
SMALL = 32  # weights in a block of GGUF
# The values of codes in E2M1, the 4-bit type of MXFP4 and NVFP4.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([E2M1, -E2M1])
LEAST = np.float32(2.0**-24)  # the smallest number above 0 in fp16
SYMMETRIC = 8  # the zero point of all codes in blocks of Q4_0


def row_bytes(source: SourceType, k: int) -> int:
    """Bytes of a row of `k` weights."""
    if source == "s8_channel":
        return k + 4
    if source == "u4m_g128":
        return k // GROUP * BLOCK_BYTES
    if source == "f32":
        return 4 * k
    if source == "e4m3_g128":
        return k + -(-k // GROUP) * 4
    if source == "nvfp4":
        return 4 + k // 16 * 9
    weights, size = {
        "gguf_q4_0": (SMALL, 18),
        "gguf_q4_1": (SMALL, 20),
        "gguf_q8_0": (SMALL, 34),
        "gguf_mxfp4": (SMALL, 17),
        "nf4_g64": (64, 34),
        "fp4_g64": (64, 34),
    }[source]
    return k // weights * size


def int8_rows(q: npt.NDArray[np.int8], scale: Float32) -> Bytes:
    """Rows of type s8_channel [n, 4 + k] from codes q [n, k] and one scale per row."""
    n, k = q.shape
    out = np.empty((n, 4 + k), np.uint8)
    out[:, :4] = scale.astype("<f4").reshape(n, 1).view(np.uint8)
    out[:, 4:] = q.view(np.uint8)
    return out


def int4_source(k: int, groups: int, *, symmetric: bool, name: str) -> SourceType:
    """The source type of 4-bit rows of `k` weights in `groups` groups of the same size.

    symmetric: the zero points of all codes are 8.

    Raises:
        ModelError: the group size is not a multiple of 32.
    """
    each = k // groups if groups and k % groups == 0 else 0
    if each and each % GROUP == 0:
        return "u4m_g128"
    if each and each % SMALL == 0:
        return "gguf_q4_0" if symmetric else "gguf_q4_1"
    msg = (
        f"{name}: {k} inputs in {groups} groups; 4-bit groups must be multiples of {SMALL} "
        f"(re-quantize with group size {GROUP}, or use the unquantized checkpoint)"
    )
    raise ModelError(msg)


def int4_rows(nibbles: Bytes, scale: Float32, zero: Float32, source: SourceType) -> Bytes:
    """Rows of a type that `int4_source` names, whose weights are scale * (code - zero).

    nibbles [n, k / 2]: element 2 i in the low and 2 i + 1 in the high half of byte i. scale, zero
    [n, groups].
    """
    n, half = nibbles.shape
    k, groups = 2 * half, scale.shape[1]
    weights = GROUP if source == "u4m_g128" else SMALL
    blocks = np.empty((n, k // weights, row_bytes(source, weights)), np.uint8)
    factors = [scale] if source == "gguf_q4_0" else [scale, -zero * scale]
    for i, values in enumerate(factors):
        halves = np.repeat(values.astype("<f2"), k // weights // groups, axis=1)
        blocks[:, :, 2 * i : 2 * i + 2] = halves[..., None].view(np.uint8)
    codes = nibbles.reshape(n, k // weights, weights // 2)
    if weights == SMALL:
        codes = _halves_apart(codes)
    blocks[:, :, 2 * len(factors) :] = codes
    return blocks.reshape(n, -1)


def _halves_apart(nibbles: Bytes) -> Bytes:
    """Nibbles of GGUF's blocks of 32 [..., 16]: element i and i + 16 share a byte, not its next."""
    first, second = nibbles[..., : SMALL // 4], nibbles[..., SMALL // 4 :]
    packed = np.empty(nibbles.shape, np.uint8)
    packed[..., ::2] = first & 15 | second << np.uint8(4)
    packed[..., 1::2] = first >> np.uint8(4) | second & 240
    return packed


def q8_rows(codes: Bytes, scale: Float32, zero: Float32) -> Bytes:
    """Rows of GGUF's Q8_0 from codes [n, k] whose weights are scale * (code - zero).

    scale, zero [n, groups], of multiples of 32 weights. A block keeps its codes, less the zero
    point, if all of these are int8 numbers. Otherwise its weights are rounded to 8 bits again.
    """
    n, k = codes.shape
    each = k // SMALL // scale.shape[1]
    steps = codes.reshape(n, -1, SMALL).astype(np.int16)
    steps -= np.repeat(zero.astype(np.int16), each, axis=1)[..., None]
    size = np.repeat(scale.astype("<f2"), each, axis=1)
    wide = (steps.min(axis=2) < -ZERO) | (steps.max(axis=2) >= ZERO)
    if wide.any():
        most = np.float32(ZERO - 1)
        values = steps[wide] * size[wide, None].astype(np.float32)
        size[wide] = (np.abs(values).max(axis=1) / most).astype("<f2")
        step = np.maximum(size[wide, None].astype(np.float32), LEAST)
        steps[wide] = np.clip(np.rint(values / step), -most, most)
    blocks = np.empty((n, k // SMALL, 34), np.uint8)
    blocks[:, :, :2] = size[..., None].view(np.uint8)
    blocks[:, :, 2:] = steps.astype(np.int8).view(np.uint8)
    return blocks.reshape(n, -1)


def mxfp4_rows(pairs: Bytes, exponents: Bytes) -> Bytes:
    """Rows of GGUF's MXFP4 from codes in E2M1 [n, k / 2], the first of a byte in its low half.

    exponents [n, k / 32]: of the scales 2^(e - 127).
    """
    n, groups = exponents.shape
    blocks = np.empty((n, groups, 17), np.uint8)
    blocks[:, :, 0] = exponents
    blocks[:, :, 1:] = _halves_apart(pairs.reshape(n, groups, SMALL // 2))
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
