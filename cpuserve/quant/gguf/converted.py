"""GGUF types without kernels: they are rewritten as other types while loading, with equal values.

TQ1_0 and TQ2_0   256 weights of -d, 0 and d; they become Q2_K, where each scale and minimum is d
Q1_0              { fp16 d; u8 signs[16] }, 128 weights: d if the bit is 1, -d if it is 0. A Q2_K
                  block has one factor for 256 weights, so Q1_0 becomes 2-bit codes with a zero
                  point instead (u2z_g128)

Source: ggml-common.h and dequantize_row_* in ggml-quants.c.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from cpuserve.quant.base import BuiltTensor
from cpuserve.quant.rows import join_bits

if TYPE_CHECKING:
    from cpuserve.program.weight_kinds import SourceType
    from cpuserve.quant.base import QuantTensor

Bytes = npt.NDArray[np.uint8]


class Conversion(NamedTuple):
    """How the blocks of a GGUF type are converted.

    to: the new type, as log messages show it.

    `rewrite` converts each block of `weights` weights
    in `nbytes` bytes to a block of the type `source` in `built` bytes.
    """

    to: str
    source: SourceType
    weights: int
    nbytes: int
    built: int
    rewrite: Callable[[Bytes], Bytes]


def converted(stored: QuantTensor, how: Conversion) -> BuiltTensor:
    """Return the tensor in rows of `how.source`; rows are rewritten when they are read."""
    blocks = stored.shape[-1] // how.weights  # blocks per row

    def build(rows: slice) -> Bytes:
        data = stored.cut(rows, blocks * how.nbytes)
        return how.rewrite(data.reshape(-1, how.nbytes)).reshape(len(data), -1)

    size = math.prod(stored.shape[:-1]) * blocks * how.built
    return BuiltTensor(stored.name, stored.shape, how.source, size, build, stored.release)


def _tq2_0(b: Bytes) -> Bytes:
    ones = np.full((len(b), 16), 0x11, np.uint8)
    return np.concatenate([ones, b[:, :64], b[:, 64:66], b[:, 64:66]], axis=1)


def _tq1_0(b: Bytes) -> Bytes:
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]
    parts = [(b[:, :32], 5), (b[:, 32:48], 5), (b[:, 48:52], 4)]
    digits = [(part[:, None] * powers[:n]).reshape(len(b), -1) for part, n in parts]
    codes = ((np.concatenate(digits, axis=1).astype(np.uint16) * 3) >> 8).astype(np.uint8)
    by_byte = codes.reshape(len(b), 2, 4, 32) << np.array([0, 2, 4, 6], np.uint8)[:, None]
    packed = np.bitwise_or.reduce(by_byte, axis=2).reshape(len(b), 64)
    return _tq2_0(np.concatenate([packed, b[:, 52:54]], axis=1))


# For each byte of 8 signs, two bytes of 2-bit codes: 0 is -d, 2 is d, and the zero point is 1.
_SIGNS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_SIGN_CODES = join_bits(_SIGNS * np.uint8(2), 2)


def _q1_0(b: Bytes) -> Bytes:
    out = np.ones((len(b), 35), np.uint8)
    out[:, :2] = b[:, :2]
    out[:, 3:] = _SIGN_CODES[b[:, 2:]].reshape(len(b), 32)
    return out


CONVERTED = {
    "TQ1_0": Conversion("Q2_K", "gguf_q2_k", 256, 54, 84, _tq1_0),
    "TQ2_0": Conversion("Q2_K", "gguf_q2_k", 256, 66, 84, _tq2_0),
    "Q1_0": Conversion("2 bits (w2z_g128)", "u2z_g128", 128, 18, 35, _q1_0),
}
