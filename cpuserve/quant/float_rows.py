"""Rows of the source types with floating-point codes (table/weights.h: SourceType).

e4m3_g128   k / 128 of { fp32 scale; u8 q[128] }, the last block perhaps shorter; FP8 E4M3
nf4_g64     k / 64 of { fp16 scale; u8 q[32] }; NF4 of QLoRA
fp4_g64     the same layout; FP4 of bitsandbytes
nvfp4       { fp32 scale; k / 16 of { E4M3 s; u8 q[8] } }; E2M1

w = scale * value, and for nvfp4 w = scale * (s * value).
A byte has two 4-bit codes, the first one in its low half.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cpuserve.quant.dense import in_row_order
from cpuserve.quant.rows import E2M1, row_bytes, spread_bits

if TYPE_CHECKING:
    import numpy.typing as npt

    from cpuserve.program.weight_kinds import SourceType
    from cpuserve.quant.base import QuantTensor

    Float32 = npt.NDArray[np.float32]
    Bytes = npt.NDArray[np.uint8]

SOURCES = ("e4m3_g128", "nf4_g64", "fp4_g64", "nvfp4")
WHOLE = 32  # divides the inputs of every FP8 or NVFP4 matrix that keeps its codes
BLOCK = 128  # number of inputs that share a scale in e4m3_g128
GROUP = 64  # number of inputs that share a scale in nf4_g64 and fp4_g64
SMALL = 16  # number of inputs that share an FP8 scale in nvfp4
NF4 = """-1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453
-0.28444138169288635 -0.18477343022823334 -0.09105003625154495 0.0
0.07958029955625534 0.16093020141124725 0.24611230194568634 0.33791524171829224
0.44070982933044434 0.5626170039176941 0.7229568362236023 1.0"""  # QLoRA, appendix E
# The values of the 16 codes of each source type.
TABLES: dict[SourceType, Float32] = {
    "nf4_g64": np.array(NF4.split(), np.float32),
    "fp4_g64": np.array(
        [s * x / 12 for s in (1, -1) for x in (0, 0.0625, 8, 12, 4, 6, 2, 3)], np.float32
    ),
}
# Values are divided by this unit, and scales are multiplied by it,
# because bf16 then rounds the values less (csrc/kernels/linear/source.h).
UNITS: dict[SourceType, float] = {"nf4_g64": 0.69589135, "fp4_g64": 1 / 12}


def float_values(exponent: int, fraction: int, finite: int) -> Float32:
    """Return the values of all codes of a float type, such as E4M3 (4, 3).

    finite: the number of codes without a sign that are finite numbers; the others are NaN here.

    Source: OCP 8-bit Floating Point 1.0, and Microscaling Formats 1.0, section 5.3.
    """
    codes = np.arange(1 << (exponent + fraction))
    bias = (1 << (exponent - 1)) - 1
    power, part = codes >> fraction, (codes & ((1 << fraction) - 1)) / (1 << fraction)
    values = np.where(power > 0, np.ldexp(1 + part, power - bias), np.ldexp(part, 1 - bias))
    values[finite:] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


E4M3 = float_values(4, 3, 127)
# By element type of an MX matrix without kernels: the bits of a code, and the values of all codes.
MX_TYPES: dict[str, tuple[int, Float32]] = {
    "fp8_e4m3": (8, E4M3),
    "fp8_e5m2": (8, float_values(5, 2, 124)),
    "fp6_e2m3": (6, float_values(2, 3, 32)),
    "fp6_e3m2": (6, float_values(3, 2, 32)),
}


def e4m3(codes: Bytes) -> Float32:
    """Return the values of bytes in FP8 E4M3 (OCP: no infinities, exponent bias 7)."""
    return E4M3[codes]


def mx_values(values: Float32, exponents: Bytes) -> Float32:
    """Return rows [n, k] of an MX matrix in fp32 from the values of its codes [n, k].

    exponents: the numbers e [n, k / 32]; a scale is 2^(e - 127).
    """
    parts = values.reshape(*exponents.shape, -1)
    found: Float32 = np.ldexp(parts, exponents.astype(np.int32)[..., None] - 127)
    return found.reshape(values.shape).astype(np.float32)


def f8_rows(codes: Bytes, scale: Float32) -> Bytes:
    """Return rows of e4m3_g128 from codes [n, k] and scales [n, ceil(k / 128)]."""
    n, k = codes.shape
    blocks = scale.shape[1]
    out = np.zeros((n, blocks, 4 + BLOCK), np.uint8)
    out[:, :, :4] = scale.astype("<f4")[..., None].view(np.uint8)
    whole = np.zeros((n, blocks * BLOCK), np.uint8)
    whole[:, :k] = codes
    out[:, :, 4:] = whole.reshape(n, blocks, BLOCK)
    return np.ascontiguousarray(out.reshape(n, -1)[:, : row_bytes("e4m3_g128", k)])


def table_rows(pairs: Bytes, scale: Float32) -> Bytes:
    """Return rows of nf4_g64 or fp4_g64 from pairs of codes [n, k / 2] and scales [n, k / 64]."""
    n, groups = scale.shape
    out = np.empty((n, groups, 2 + GROUP // 2), np.uint8)
    out[:, :, :2] = scale.astype("<f2")[..., None].view(np.uint8)
    out[:, :, 2:] = pairs.reshape(n, groups, GROUP // 2)
    return out.reshape(n, -1)


def nvfp4_rows(pairs: Bytes, small: Bytes, scale: Float32) -> Bytes:
    """Return rows of nvfp4 from pairs of codes [n, k / 2] and FP8 scales [n, k / 16].

    scale: fp32 [1], or [n] with a scale for each row.
    """
    n, groups = small.shape
    out = np.empty((n, 4 + groups * (1 + SMALL // 2)), np.uint8)
    out[:, :4] = scale.astype("<f4").reshape(-1, 1).view(np.uint8)
    blocks = out[:, 4:].reshape(n, groups, 1 + SMALL // 2)
    blocks[:, :, 0] = small
    blocks[:, :, 1:] = pairs.reshape(n, groups, SMALL // 2)
    out[:, 4:] = blocks.reshape(n, -1)
    return out


def dequantize(tensor: QuantTensor) -> Float32:
    """Return an fp32 copy of a tensor of one of these types, with its shape."""
    values, scale, group = read_values(tensor)
    spread = np.repeat(scale, group, axis=1)[:, : values.shape[1]]
    return (values * spread).reshape(tensor.shape)


def widened(tensor: QuantTensor) -> tuple[Float32, Float32, int]:
    """Return the same as `read_values`, with NF4 and FP4 values divided by their unit (UNITS)."""
    values, scale, group = read_values(tensor)
    unit = np.float32(UNITS.get(tensor.source, 1))
    return values / unit, scale * unit, group


def read_values(tensor: QuantTensor) -> tuple[Float32, Float32, int]:
    """Return (values of the codes [n, k], scales [n, groups], group size), rows in packed order."""
    data = np.ascontiguousarray(in_row_order(tensor.data, tensor))
    n, k = len(data), tensor.shape[-1]
    if tensor.source == "e4m3_g128":
        starts = range(0, data.shape[1], 4 + BLOCK)
        codes = np.concatenate([data[:, at + 4 : at + 4 + BLOCK] for at in starts], axis=1)
        scales = np.concatenate([data[:, at : at + 4] for at in starts], axis=1)
        return e4m3(codes), scales.view("<f4").astype(np.float32), BLOCK
    if tensor.source == "nvfp4":
        scale = np.ascontiguousarray(data[:, :4]).view("<f4").astype(np.float32)
        blocks = data[:, 4:].reshape(n, -1, 1 + SMALL // 2)
        values = e4m3(blocks[:, :, :1]) * E2M1[spread_bits(blocks[:, :, 1:], 4)]
        return values.reshape(n, k), scale, k
    blocks = data.reshape(n, -1, 2 + GROUP // 2)
    halves = np.ascontiguousarray(blocks[:, :, :2]).view("<f2").astype(np.float32)
    values = TABLES[tensor.source][spread_bits(blocks[:, :, 2:], 4)]
    return values.reshape(n, k), halves.reshape(n, -1), GROUP
