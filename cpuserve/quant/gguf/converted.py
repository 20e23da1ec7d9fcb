"""GGUF types without kernels: they are rewritten as other types while loading, with equal values.

TQ1_0             256 weights of -d, 0 and d, five ternary digits in a byte; they become TQ2_0
PTQ1_0            { u8 digits[26]; fp16 d }, 128 such weights; they become PQ2_0. Both are types of
                  Prism's fork of llama.cpp
NVFP4             { u8 scale[4]; u8 q[32] }, 64 weights; they become rows of source nvfp4. A scale
                  is E4M3 without a sign, for 16 weights. Their E2M1 codes take 8 bytes: byte i has
                  weight i in its low half and weight i + 8 in its high half

A matrix of NVFP4 may have an fp32 factor in a separate tensor,
and a stack of experts a factor for each expert. llama.cpp multiplies the product by the factor;
here the factor is the scale of the rows. Input scales are meant for 4-bit activations
and are ignored, because activations are bf16 here (and int8 in llama.cpp).

Source: ggml-common.h and dequantize_row_* in ggml-quants.c;
_generate_nvfp4_tensors of the converter of llama.cpp.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from cpuserve.base.errors import ModelError
from cpuserve.quant.base import BuiltTensor
from cpuserve.quant.float_rows import SMALL, nvfp4_rows
from cpuserve.quant.rows import join_bits, row_bytes

if TYPE_CHECKING:
    from cpuserve.program.weight_kinds import SourceType
    from cpuserve.quant.base import QuantTensor
    from cpuserve.quant.stored import TensorStore

Bytes = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]


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


def _ternary_digits(parts: Sequence[tuple[Bytes, int]]) -> Bytes:
    """Return the first n digits of every byte of each (bytes [rows, m], n) in `parts`.

    Digit 0 of all bytes of a part comes first, then digit 1, and so on. A byte is the fraction
    0.d0 d1 d2 d3 d4 of base 3 in 256ths, rounded up.
    """
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]
    moved = [(part[:, None] * powers[:n]).reshape(len(part), -1) for part, n in parts]
    return ((np.concatenate(moved, axis=1).astype(np.uint16) * 3) >> 8).astype(np.uint8)


def _tq1_0(b: Bytes) -> Bytes:
    parts = [(b[:, :32], 5), (b[:, 32:48], 5), (b[:, 48:52], 4)]
    codes = _ternary_digits(parts)
    by_byte = codes.reshape(len(b), 2, 4, 32) << np.array([0, 2, 4, 6], np.uint8)[:, None]
    packed = np.bitwise_or.reduce(by_byte, axis=2).reshape(len(b), 64)
    return np.concatenate([packed, b[:, 52:54]], axis=1)


def _ptq1_0(b: Bytes) -> Bytes:
    codes = _ternary_digits([(b[:, :16], 5), (b[:, 16:24], 5), (b[:, 24:26], 4)])
    return np.concatenate([b[:, 26:], join_bits(codes, 2)], axis=1)


CONVERTED = {
    "TQ1_0": Conversion("TQ2_0", "gguf_tq2_0", 256, 54, 66, _tq1_0),
    "PTQ1_0": Conversion("PQ2_0", "gguf_pq2_0", 128, 28, 34, _ptq1_0),
}


log = logging.getLogger(__name__)

NVFP4 = "NVFP4"
WEIGHTS, SIZE = 64, 36  # number of weights and of bytes in an NVFP4 block
# Suffixes of the tensors with factors and input scales; the text before the suffix is the matrix.
FACTOR, INPUT = "_scale", "input_scale"
MAGNITUDE = 127  # the bits of an FP8 scale without its sign; 127 is NaN
NO_NUMBER = 255


class Factors:
    """The fp32 factors of the NVFP4 matrices in a checkpoint."""

    def __init__(self, store: TensorStore) -> None:
        """Raise ModelError for factors that do not fit; log if there are input scales."""
        self._store = store
        names = store.names()
        self._of = {n.removesuffix(FACTOR): n for n in names if n.endswith("weight" + FACTOR)}
        inputs = {n for n in names if n.endswith(INPUT)}
        self.names = {*self._of.values(), *inputs}
        for matrix in sorted(self._of):
            self._check(matrix)
        for name in sorted(inputs):
            self._check_type(name.removesuffix(INPUT) + "weight", name)
        if inputs:
            log.info(
                "the input scales of NVFP4 weights are not needed: activations keep more than 4 "
                "bits"
            )

    def get(self, matrix: str) -> Float32:
        """Return the factor of a matrix, or one for each matrix of a stack; 1 if there is none.

        Raises:
          ModelError: a factor is not a finite number.
        """
        found = self._of.get(matrix)
        if found is None:
            return np.ones(1, np.float32)
        factors = self._store.get(found).data.view("<f4").astype(np.float32)
        if not np.isfinite(factors).all():
            msg = f"{found} has a scale that is not a finite number; download the file again"
            raise ModelError(msg)
        return factors

    def _check(self, matrix: str) -> None:
        self._check_type(matrix, self._of[matrix])
        factors = self._store.get(self._of[matrix])
        shape = self._store.get(matrix).shape
        count = math.prod(shape[:-2])
        if factors.dtype != "F32" or factors.shape not in ((1,), (count,)):
            of = f"for the {count} matrices of {matrix}" if count > 1 else f"for {matrix}"
            msg = f"{factors.name} is {factors.dtype} {list(factors.shape)}, not F32 [{count}] {of}"
            raise ModelError(msg)

    def _check_type(self, matrix: str, name: str) -> None:
        found = self._store.dtype(matrix) if matrix in self._store.names() else None
        if found != NVFP4:
            what = "which is missing" if found is None else f"whose type is {found}"
            msg = (
                f"the file has {name} for {matrix}, {what}; only NVFP4 matrices may have such a "
                "scale: make the file again from the original model"
            )
            raise ModelError(msg)


def nvfp4_matrix(stored: QuantTensor, factors: Float32) -> BuiltTensor:
    """Return the matrix, or the stack of matrices, in rows of nvfp4.

    factors: one number, or one for each matrix of a stack.
    Reading rows raises ModelError if they have a scale that is NaN.
    """
    *outer, k = stored.shape
    count, blocks = math.prod(outer), k // WEIGHTS
    rows_per_factor = count // len(factors)

    def build(rows: slice) -> Bytes:
        data = stored.cut(rows, blocks * SIZE).reshape(-1, blocks, SIZE)
        return nvfp4_rows(
            _pairs(data[..., 4:]).reshape(len(data), -1),
            _scales(data[..., :4], stored.name).reshape(len(data), -1),
            factors[np.arange(*rows.indices(count)) // rows_per_factor],
        )

    size = count * row_bytes("nvfp4", k)
    return BuiltTensor(stored.name, stored.shape, "nvfp4", size, build, stored.release)


def _pairs(packed: Bytes) -> Bytes:
    """Return the codes so that neighbouring weights share a byte, the first one in the low half."""
    packed = packed.reshape(*packed.shape[:-1], -1, SMALL // 2)
    first, second = packed[..., ::2], packed[..., 1::2]
    out = np.empty(packed.shape, np.uint8)
    out[..., : SMALL // 4] = first & 15 | second << np.uint8(4)
    out[..., SMALL // 4 :] = first >> np.uint8(4) | second & 240
    return out


def _scales(codes: Bytes, name: str) -> Bytes:
    """Return the scales in E4M3 with the values that ggml reads: it ignores the sign, and 127 is 0.

    ggml reads 255 as 480 on CPUs and as 0 on GPUs. No converter writes 255, so it is refused.
    """
    if (codes == NO_NUMBER).any():
        msg = f"{name} has an NVFP4 scale that is no number (255); download the file again"
        raise ModelError(msg)
    return np.where(codes == MAGNITUDE, 0, codes & MAGNITUDE).astype(np.uint8)
