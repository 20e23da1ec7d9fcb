"""Rows of source types for quantized checkpoints except GGUF (table/weights.h: SourceType).

s8_channel  { fp32 scale; s8 q[k] }                          w = scale * q
u4m_g128    k / 128 of { fp16 scale; fp16 min; u8 q[64] }    w = scale * q + min
u8z_g32 u8z_g128   k / 32 or 128 of { fp16 scale; u8 zero; u8 q[] }   w = scale * (q - zero)
u4z_g32 u4z_g64    k / 32 or 64 of the same blocks, with 4-bit codes
u2z_g32 to u2z_g256 u3z_g32 to u3z_g256   k / 32, 64, 128 or 256, with codes of 2 and 3 bits

The codes of a block are a stream of bits, the lowest bits first.
Symmetric codes of 4 or 8 bits in small groups may become GGUF blocks of 32 weights (Q4_0, Q8_0).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cpuserve.base.errors import ModelError
from cpuserve.program.weight_kinds import KINDS, SourceType
from cpuserve.quant.codes import GROUP, ZERO, Codes

if TYPE_CHECKING:
    import numpy.typing as npt

    from cpuserve.quant.base import QuantTensor

    Float32 = npt.NDArray[np.float32]
    Bytes = npt.NDArray[np.uint8]

SMALL, HALF = 32, 64  # number of weights in a GGUF block, and in a block of u4z_g64
# (number of weights, number of bytes) of a block, by source type.
BLOCKS = {kind.source: kind.block for kind in KINDS if kind.source and kind.block}
# The source types for each number of bits of a code, 2 or 3;
# types with larger groups come first.
FEW_BITS: dict[int, tuple[SourceType, ...]] = {
    2: ("u2z_g256", "u2z_g128", "u2z_g64", "u2z_g32"),
    3: ("u3z_g256", "u3z_g128", "u3z_g64", "u3z_g32"),
}
# Source types with zero points that take half a byte each after packing.
HALF_ZEROS = (*FEW_BITS[2], *FEW_BITS[3])
# Source types with integer zero points.
ZEROS = tuple(kind.source for kind in KINDS if kind.zeros and kind.source)
SOURCES = ("s8_channel", "u4m_g128", *ZEROS)
# The values of the codes in E2M1, the 4-bit type of MXFP4 and NVFP4.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([E2M1, -E2M1])
SYMMETRIC = 8  # the zero point of all codes in blocks of Q4_0


def row_bytes(source: SourceType, k: int) -> int:
    """Return the bytes of a row of `k` weights in a source type."""
    if source == "s8_channel":
        return k + 4
    if source == "f32":
        return 4 * k
    if source == "e4m3_g128":
        return k + -(-k // GROUP) * 4
    if source == "nvfp4":
        return 4 + k // 16 * 9
    weights, size = BLOCKS[source]
    return k // weights * size


def packed_row_bytes(source: SourceType, k: int) -> float:
    """Return the bytes of a row of `k` weights after packing into the weight kind of the source."""
    return row_bytes(source, k) - (k / BLOCKS[source][0] / 2 if source in HALF_ZEROS else 0)


def code_bits(source: SourceType) -> int:
    """Return the bits of a code: the bits of a block per weight, rounded down (no header)."""
    weights, size = BLOCKS[source]
    return size * 8 // weights


def spread_bits(packed: Bytes, bits: int) -> Bytes:
    """Return codes [..., 8 / bits * m] of `bits` bits from bytes [..., m], lowest bits first."""
    shape = (*packed.shape[:-1], -1)
    if 8 % bits == 0:
        shifts = range(0, 8, bits)
        codes = np.stack([packed >> np.uint8(shift) for shift in shifts], axis=-1)
        codes &= np.uint8((1 << bits) - 1)
        return codes.reshape(shape)
    digits = np.unpackbits(packed, axis=-1, bitorder="little").reshape(*shape, bits)
    joined: Bytes = (digits << np.arange(bits, dtype=np.uint8)).sum(axis=-1, dtype=np.uint8)
    return joined


def join_bits(codes: Bytes, bits: int) -> Bytes:
    """Return the bytes from codes: the reverse of `spread_bits`."""
    if 8 % bits == 0:
        each = 8 // bits  # number of codes in a byte
        packed = codes[..., ::each].copy()
        for i in range(1, each):
            packed |= codes[..., i::each] << np.uint8(i * bits)
        return packed
    digits = codes[..., None] >> np.arange(bits, dtype=np.uint8) & np.uint8(1)
    stream = digits.reshape(*codes.shape[:-1], -1)
    return np.packbits(stream, axis=-1, bitorder="little")


def int8_rows(q: npt.NDArray[np.int8], scale: Float32) -> Bytes:
    """Return rows of type s8_channel [n, 4 + k] from codes q [n, k] and one scale per row."""
    n, k = q.shape
    out = np.empty((n, 4 + k), np.uint8)
    out[:, :4] = scale.astype("<f4").reshape(n, 1).view(np.uint8)
    out[:, 4:] = q.view(np.uint8)
    return out


def few_bits_source(k: int, groups: int, bits: int, *, symmetric: bool, name: str) -> SourceType:
    """Return the source type for rows of `k` codes of 2, 3 or 4 bits in `groups` equal groups.

    symmetric: whether the codes have 4 bits, and all zero points are 8.

    Raises:
        ModelError: the group size is not a multiple of 32.
    """
    each = k // groups if groups and k % groups == 0 else 0
    for source in FEW_BITS.get(bits, ()):
        if each and each % BLOCKS[source][0] == 0:
            return source
    if each and each % GROUP == 0:
        return "u4m_g128"
    if each and each % HALF == 0:
        return "u4z_g64"
    if each and each % SMALL == 0:
        return "gguf_q4_0" if symmetric else "u4z_g32"
    msg = (
        f"{name}: {k} inputs in {groups} groups; {bits}-bit groups must be multiples of {SMALL} "
        f"(re-quantize with group size {GROUP}, or use the unquantized checkpoint)"
    )
    raise ModelError(msg)


def int8_source(each: int, *, symmetric: bool) -> SourceType:
    """Return the source type of 8-bit rows with a scale and a zero point for `each` weights.

    symmetric: whether the zero points of all codes are 128. Such rows become Q8_0,
    which has more scales than groups of 128, but no zero points.
    """
    if symmetric and each <= GROUP:
        return "gguf_q8_0"
    return "u8z_g32" if each % GROUP else "u8z_g128"


def int_rows(codes: Bytes, scale: Float32, zero: Float32, source: SourceType) -> Bytes:
    """Return rows of a type from `few_bits_source` or `int8_source`; w = scale * (code - zero).

    codes: [n, k * bits / 8], lowest bits first. scale, zero: [n, groups].
    """
    n, groups = scale.shape
    weights, _ = BLOCKS[source]
    size = weights * code_bits(source) // 8
    blocks = codes.reshape(n, -1, size)
    fields: list[Any] = [("scale", "<f2"), ("codes", "u1", (size,))]
    if source == "u4m_g128":
        fields.insert(1, ("least", "<f2"))
    if source in ZEROS:
        fields.insert(1, ("zero", "u1"))
    out = np.empty(blocks.shape[:2], fields)
    of_groups = out.reshape(n, groups, -1)  # a group of inputs may be several blocks
    of_groups["scale"] = scale[..., None]
    if source == "u4m_g128":
        of_groups["least"] = (-zero * scale)[..., None]
    if source in ZEROS:
        of_groups["zero"] = zero.astype(np.uint8)[..., None]
    if source == "gguf_q4_0":
        blocks = _halves_apart(blocks)
    if source == "gguf_q8_0":
        blocks = blocks ^ np.uint8(ZERO)
    out["codes"] = blocks
    return out.view(np.uint8).reshape(n, -1)


def affine_rows(codes: Bytes, scale: Float32, least: Float32, source: SourceType) -> Bytes:
    """Return rows of u4m_g128 or gguf_q4_1 from 4-bit codes; w = scale * code + least.

    codes: [n, k / 2], the first code in the low half. scale, least: [n, groups]; a group has whole
    blocks of the source type.
    """
    n, groups = scale.shape
    weights, size = BLOCKS[source]
    blocks = codes.reshape(n, -1, weights // 2)
    fields: list[Any] = [("scale", "<f2"), ("least", "<f2"), ("codes", "u1", (size - 4,))]
    out = np.empty(blocks.shape[:2], fields)
    of_groups = out.reshape(n, groups, -1)
    of_groups["scale"], of_groups["least"] = scale[..., None], least[..., None]
    out["codes"] = _halves_apart(blocks) if source == "gguf_q4_1" else blocks
    return out.view(np.uint8).reshape(n, -1)


def _halves_apart(nibbles: Bytes) -> Bytes:
    """Return 32 nibbles [..., 16] in the order of GGUF: elements i and i + 16 share a byte."""
    first, second = nibbles[..., : SMALL // 4], nibbles[..., SMALL // 4 :]
    packed = np.empty(nibbles.shape, np.uint8)
    packed[..., ::2] = first & 15 | second << np.uint8(4)
    packed[..., 1::2] = first >> np.uint8(4) | second & 240
    return packed


def mxfp4_rows(pairs: Bytes, exponents: Bytes) -> Bytes:
    """Return rows of MXFP4 as in GGUF from E2M1 codes [n, k / 2]; a low half has the first code.

    exponents: the numbers e [n, k / 32]; a scale is 2^(e - 127).
    """
    n, groups = exponents.shape
    blocks = np.empty((n, groups, 17), np.uint8)
    blocks[:, :, 0] = exponents
    blocks[:, :, 1:] = _halves_apart(pairs.reshape(n, groups, SMALL // 2))
    return blocks.reshape(n, -1)


def read_codes(tensor: QuantTensor) -> Codes:
    """Return the codes and scales of a tensor of one of these types, with row_order applied.

    The scales of types with zero points are repeated for every 32 weights,
    because the activation rows that these weights multiply have a scale per 32 inputs.
    """
    data = tensor.data if tensor.row_order is None else tensor.data[tensor.row_order]
    data = np.ascontiguousarray(data)
    if tensor.source == "s8_channel":
        scale = np.ascontiguousarray(data[:, :4]).view("<f4").astype(np.float32)
        return Codes(data[:, 4:] ^ np.uint8(ZERO), scale, None, data.shape[1] - 4)
    weights, size = BLOCKS[tensor.source]
    blocks = data.reshape(len(data), -1, size)
    scale = np.ascontiguousarray(blocks[:, :, :2]).view("<f2")[..., 0].astype(np.float32)
    if tensor.source in ZEROS:
        least, codes = -scale * blocks[:, :, 2], blocks[:, :, 3:]
        scale, least = (np.repeat(x, weights // SMALL, axis=1) for x in (scale, least))
        weights = SMALL
    else:
        least = np.ascontiguousarray(blocks[:, :, 2:4]).view("<f2")[..., 0].astype(np.float32)
        codes = blocks[:, :, 4:]
    codes = spread_bits(codes, code_bits(tensor.source))
    return Codes(codes.reshape(len(data), -1), scale, least, weights)


def dequantize(tensor: QuantTensor) -> Float32:
    """Return an fp32 copy of the tensor, of the shape `tensor.shape`."""
    return read_codes(tensor).values().reshape(tensor.shape)
