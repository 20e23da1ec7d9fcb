"""GGUF block formats: blocks of 32 or 256 weights with their scales, and in some types minimums.

Block layouts follow ggml-common.h. A weight is scale * (code - zero) + minimum.
Blocks of 256 weights (the k-quants and IQ4_XS) have an integer scale for each 16 or 32 weights, and
in some types an integer minimum. One fp16 factor multiplies all scales of a block, and another one
all minimums, which are subtracted. The codes of IQ4_NL, IQ4_XS and MXFP4 are indices into a table.
The codes of IQ1 to IQ3 select 4 or 8 weights from a grid. Here, and in memory, these weights have
a code each.
Ternary types and the signs of Q1_0 have one fp16 factor for 64 to 256 weights.
Q2_0 is { fp16 d; u8 codes[16] } with 64 weights d (q - 1); PQ2_0, of Prism's fork of llama.cpp,
has 128 weights.
The types that are converted, such as NVFP4, have a file of their own (converted.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cpuserve.program.weight_kinds import SourceType
from cpuserve.quant import dense
from cpuserve.quant.base import QuantTensor, Weights
from cpuserve.quant.codes import Codes
from cpuserve.quant.gguf.converted import CONVERTED, NVFP4, Factors, converted, nvfp4_matrix
from cpuserve.quant.registry import weight_format
from cpuserve.quant.rows import spread_bits
from cpuserve.quant.stored import StoredWeights, TensorStore

log = logging.getLogger(__name__)

Float32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

QUANTIZED: dict[str, SourceType] = {
    "Q8_0": "gguf_q8_0",
    "Q4_0": "gguf_q4_0",
    "Q4_1": "gguf_q4_1",
    "Q5_0": "gguf_q5_0",
    "Q5_1": "gguf_q5_1",
    "Q2_K": "gguf_q2_k",
    "Q3_K": "gguf_q3_k",
    "Q4_K": "gguf_q4_k",
    "Q5_K": "gguf_q5_k",
    "Q6_K": "gguf_q6_k",
    "IQ4_NL": "gguf_iq4_nl",
    "IQ4_XS": "gguf_iq4_xs",
    "IQ3_S": "gguf_iq3_s",
    "IQ3_XXS": "gguf_iq3_xxs",
    "IQ2_S": "gguf_iq2_s",
    "IQ2_XS": "gguf_iq2_xs",
    "IQ2_XXS": "gguf_iq2_xxs",
    "IQ1_M": "gguf_iq1_m",
    "IQ1_S": "gguf_iq1_s",
    "MXFP4": "gguf_mxfp4",
    "TQ2_0": "gguf_tq2_0",
    "Q2_0": "gguf_q2_0",
    "PQ2_0": "gguf_pq2_0",
    "Q1_0": "gguf_q1_0",
    "NVFP4": "nvfp4",
}
SOURCES: dict[str, SourceType] = {
    **dense.SOURCES,
    **QUANTIZED,
    **{dtype: how.source for dtype, how in CONVERTED.items()},
}


class Block(NamedTuple):
    """The content of n blocks: codes [n, weights], the code `zero` for the value 0, and scales.

    scale, minimum (None if the type has no minimums): fp32 [n, weights / group].
    """

    codes: Bytes
    zero: int
    scale: Float32
    minimum: Float32 | None = None


class BlockType(NamedTuple):
    """A type with blocks of `weights` weights in `nbytes` bytes; `group` weights share a scale.

    take: a function that reads the fields of blocks [n, nbytes].
    """

    weights: int
    nbytes: int
    group: int
    take: Callable[[Bytes], Block]


@weight_format("gguf")
def gguf_weights(store: TensorStore, config: dict[str, Any]) -> Weights:  # noqa: ARG001
    """Return the weights of a GGUF file, which may have quantized and dense tensors."""
    return GgufWeights(store)


class GgufWeights(StoredWeights):
    """Weights of a GGUF file; blocks of some types are converted when they are read."""

    def __init__(self, store: TensorStore) -> None:
        """Raise ModelError for unknown types or scales; log the types that are converted."""
        super().__init__(store, SOURCES)
        self._factors = Factors(store)
        self._names -= self._factors.names
        found = {store.dtype(name) for name in store.names()}
        for dtype in sorted(found & CONVERTED.keys()):
            to = CONVERTED[dtype].to
            log.info("%s weights are converted to %s, with the same values", dtype, to)

    def get(self, name: str) -> QuantTensor:
        """Return the tensor as rows of its source type."""
        tensor, dtype = super().get(name), self._store.dtype(name)
        if dtype == NVFP4:
            return nvfp4_matrix(tensor, self._factors.get(name))
        return converted(tensor, CONVERTED[dtype]) if dtype in CONVERTED else tensor


def read_codes(tensor: QuantTensor) -> Codes:
    """Return the codes and scales of a quantized tensor, with row_order applied."""
    block = BLOCKS[tensor.source]
    data = tensor.data if tensor.row_order is None else tensor.data[tensor.row_order]
    taken = block.take(np.ascontiguousarray(data).reshape(-1, block.nbytes))
    rows = len(data)
    minimum = None if taken.minimum is None else taken.minimum.reshape(rows, -1)
    codes, scale = taken.codes.reshape(rows, -1), taken.scale.reshape(rows, -1)
    return Codes(codes, scale, minimum, block.group, taken.zero)


def dequantize(tensor: QuantTensor) -> Float32:
    """Return an fp32 copy of the tensor, computed in fp32 exactly as in ggml's dequantize_row_*."""
    if tensor.source not in BLOCKS:
        return dense.dequantize(tensor)
    return read_codes(tensor).values().reshape(tensor.shape)


# -- blocks of 32 -------------------------------------------------------------------------------


def _q8_0(b: Bytes) -> Block:
    return Block(b[:, 2:] ^ np.uint8(128), 128, _half(b, 0))


def _q4_0(b: Bytes) -> Block:
    return Block(_nibbles(b[:, 2:], 16), 8, _half(b, 0))


def _q4_1(b: Bytes) -> Block:
    return Block(_nibbles(b[:, 4:], 16), 0, _half(b, 0), _half(b, 2))


def _q5_0(b: Bytes) -> Block:
    return Block(_nibbles(b[:, 6:], 16) | _fifth_bits(b[:, 2:6]), 16, _half(b, 0))


def _q5_1(b: Bytes) -> Block:
    return Block(_nibbles(b[:, 8:], 16) | _fifth_bits(b[:, 4:8]), 0, _half(b, 0), _half(b, 2))


_IQ4 = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int16
)
_IQ4_CODES = (_IQ4 + 128).astype(np.uint8)
# The values of E2M1 times 2, which are integers; the scale is therefore half of 2^(e - 127).
_FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int16)
_FP4_CODES = (_FP4 + 128).astype(np.uint8)


def _iq4_nl(b: Bytes) -> Block:
    return Block(_IQ4_CODES[_nibbles(b[:, 2:], 16)], 128, _half(b, 0))


def _mxfp4(b: Bytes) -> Block:
    scale = np.ldexp(np.float32(1), b[:, :1].astype(np.int32) - 128)
    return Block(_FP4_CODES[_nibbles(b[:, 1:], 16)], 128, scale.astype(np.float32))


# -- ternary blocks and signs --------------------------------------------------------------------


def _tq2_0(b: Bytes) -> Block:
    return Block(_twos(b[:, :64]), 1, _half(b, 64))


def _q2_0(b: Bytes) -> Block:
    return Block(spread_bits(b[:, 2:], 2), 1, _half(b, 0))


def _q1_0(b: Bytes) -> Block:
    return Block(spread_bits(b[:, 2:], 1) << np.uint8(1), 1, _half(b, 0))


# -- blocks of 256 ------------------------------------------------------------------------------


def _q2_k(b: Bytes) -> Block:
    scale = _half(b, 80) * (b[:, :16] & 15).astype(np.float32)
    least = _half(b, 82) * (b[:, :16] >> 4).astype(np.float32)
    return Block(_twos(b[:, 16:80]), 0, scale, -least)


def _q3_k(b: Bytes) -> Block:
    low = _nibbles(b[:, 96:104], 8)
    high = _shifted(b[:, 104:108], (0, 2, 4, 6), 3)
    scale = _half(b, 108) * ((low | high << 4).astype(np.int8) - np.int8(32)).astype(np.float32)
    return Block(_twos(b[:, 32:96]) | _shifted(b[:, :32], range(8), 1) << np.uint8(2), 4, scale)


def _q4_k(b: Bytes) -> Block:
    return Block(_nibbles(b[:, 16:], 32), 0, *_six_bit_factors(b))


def _q5_k(b: Bytes) -> Block:
    codes = _nibbles(b[:, 48:], 32) | _shifted(b[:, 16:48], range(8), 1) << np.uint8(4)
    return Block(codes, 0, *_six_bit_factors(b))


def _q6_k(b: Bytes) -> Block:
    scales = np.ascontiguousarray(b[:, 192:208]).view(np.int8).astype(np.float32)
    return Block(
        _nibbles(b[:, :128], 64) | _twos(b[:, 128:192]) << np.uint8(4), 32, _half(b, 208) * scales
    )


def _iq4_xs(b: Bytes) -> Block:
    low = np.stack([b[:, 4:8] & 15, b[:, 4:8] >> 4], axis=2).reshape(-1, 8)
    both = np.ascontiguousarray(b[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16)
    high = (both & 3).astype(np.uint8)
    scales = ((low | high << 4).astype(np.int8) - np.int8(32)).astype(np.float32)
    return Block(_IQ4_CODES[_nibbles(b[:, 8:], 16)], 128, _half(b, 0) * scales)


# -- blocks of 256 with a grid ------------------------------------------------------------------


@cache
def _grid(dtype: str) -> npt.NDArray[np.int16]:
    """The grid of a type [entries, weights]: ggml's table, which the gguf package has."""
    import gguf

    kind = getattr(gguf.quants, dtype)
    kind.init_grid()
    return np.asarray(kind.grid).reshape(kind.grid_shape).astype(np.int16)


def _from_grid(dtype: str, index: npt.NDArray[Any], signs: Bytes, scale: Float32) -> Block:
    """Return the block of entries `index` [n, entries]; a bit of `signs` [n, 32] is 1 for minus."""
    values = _grid(dtype)[index].reshape(len(index), 256)
    negative = np.unpackbits(signs, axis=1, bitorder="little")
    return Block((np.where(negative, -values, values) + 128).astype(np.uint8), 128, scale)


def _odd_scales(packed: Bytes) -> Float32:
    """Return the scales 2 s + 1; a byte has two numbers s of 4 bits, the lower one first."""
    both = np.stack([packed & 15, packed >> 4], axis=2).reshape(len(packed), -1)
    return _odd(both)


def _eighth_signs(sevens: npt.NDArray[Any]) -> Bytes:
    """Return 8 signs from the lowest 7 bits of each number: an even number of signs is minus."""
    seven = (sevens & 127).astype(np.uint8)
    odd = np.bitwise_xor.reduce(seven[..., None] >> np.arange(7, dtype=np.uint8), axis=-1) & 1
    signs: Bytes = seven | odd << np.uint8(7)
    return signs.reshape(len(sevens), -1)


def _words(blocks: Bytes, first: int, end: int, dtype: str) -> npt.NDArray[Any]:
    return np.ascontiguousarray(blocks[:, first:end]).view(dtype)


def _odd(numbers: npt.NDArray[Any]) -> Float32:
    return np.float32(2) * numbers.astype(np.float32) + np.float32(1)


_SEVENS = np.array([0, 7, 14, 21], np.uint32)
_EIGHTH = np.float32(0.125)


def _iq2_xxs(b: Bytes) -> Block:
    words = _words(b, 2, 66, "<u4").reshape(len(b), 8, 2)
    index = np.ascontiguousarray(words[..., 0]).view(np.uint8)
    scale = _half(b, 0) * _odd(words[..., 1] >> 28) * _EIGHTH
    return _from_grid("IQ2_XXS", index, _eighth_signs(words[..., 1:] >> _SEVENS), scale)


def _iq2_xs(b: Bytes) -> Block:
    words = _words(b, 2, 66, "<u2")
    scale = _half(b, 0) * _odd_scales(b[:, 66:]) * _EIGHTH
    return _from_grid("IQ2_XS", words & 511, _eighth_signs(words >> 9), scale)


def _iq2_s(b: Bytes) -> Block:
    shifts = np.array([0, 2, 4, 6], np.uint8)
    high = (b[:, 66:74, None] >> shifts & 3).reshape(len(b), 32).astype(np.uint16)
    scale = _half(b, 0) * _odd_scales(b[:, 74:]) * _EIGHTH
    return _from_grid("IQ2_S", b[:, 2:34] | high << 8, b[:, 34:66], scale)


def _iq3_xxs(b: Bytes) -> Block:
    words = _words(b, 66, 98, "<u4")
    scale = _half(b, 0) * _odd(words >> 28) * np.float32(0.25)
    signs = _eighth_signs(words[..., None] >> _SEVENS)
    return _from_grid("IQ3_XXS", b[:, 2:66], signs, scale)


def _iq3_s(b: Bytes) -> Block:
    high = np.unpackbits(b[:, 66:74], axis=1, bitorder="little").astype(np.uint16)
    scale = _half(b, 0) * _odd_scales(b[:, 106:])
    return _from_grid("IQ3_S", b[:, 2:66] | high << 8, b[:, 74:106], scale)


def _iq1(index: npt.NDArray[Any], minus: npt.NDArray[np.bool_], scale: Float32) -> Block:
    """Return ternary weights plus or minus 1/8 as codes of eighths.

    minus: whether the delta is -1/8 [n, deltas].
    """
    eighths = 8 * _grid("IQ1_S")[index].reshape(*minus.shape, -1)
    eighths += np.where(minus, np.int16(-1), np.int16(1))[..., None]
    return Block((eighths + 128).astype(np.uint8).reshape(len(index), 256), 128, scale * _EIGHTH)


def _iq1_s(b: Bytes) -> Block:
    words = _words(b, 34, 50, "<u2")
    high = (words[..., None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(len(b), 32)
    scale = _half(b, 0) * _odd(words >> 12 & 7)
    return _iq1(b[:, 2:34] | high << 8, words >= 1 << 15, scale)


def _iq1_m(b: Bytes) -> Block:
    words = _words(b, 48, 56, "<u2")
    high = np.stack([b[:, 32:48] & 15, b[:, 32:48] >> 4], axis=2).reshape(len(b), 32)
    bits = np.bitwise_or.reduce(words >> 12 << np.array([0, 4, 8, 12], np.uint16), axis=1)
    small = (words[..., None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(len(b), 16)
    scale = bits.view("<f2").astype(np.float32)[:, None] * _odd(small)
    return _iq1(b[:, :32] | (high & 7).astype(np.uint16) << 8, high >= 8, scale)


BLOCKS: dict[SourceType, BlockType] = {
    "gguf_q8_0": BlockType(32, 34, 32, _q8_0),
    "gguf_q4_0": BlockType(32, 18, 32, _q4_0),
    "gguf_q4_1": BlockType(32, 20, 32, _q4_1),
    "gguf_q5_0": BlockType(32, 22, 32, _q5_0),
    "gguf_q5_1": BlockType(32, 24, 32, _q5_1),
    "gguf_iq4_nl": BlockType(32, 18, 32, _iq4_nl),
    "gguf_mxfp4": BlockType(32, 17, 32, _mxfp4),
    "gguf_tq2_0": BlockType(256, 66, 256, _tq2_0),
    "gguf_q2_0": BlockType(64, 18, 64, _q2_0),
    "gguf_pq2_0": BlockType(128, 34, 128, _q2_0),
    "gguf_q1_0": BlockType(128, 18, 128, _q1_0),
    "gguf_q2_k": BlockType(256, 84, 16, _q2_k),
    "gguf_q3_k": BlockType(256, 110, 16, _q3_k),
    "gguf_q4_k": BlockType(256, 144, 32, _q4_k),
    "gguf_q5_k": BlockType(256, 176, 32, _q5_k),
    "gguf_q6_k": BlockType(256, 210, 16, _q6_k),
    "gguf_iq4_xs": BlockType(256, 136, 32, _iq4_xs),
    "gguf_iq3_s": BlockType(256, 110, 32, _iq3_s),
    "gguf_iq3_xxs": BlockType(256, 98, 32, _iq3_xxs),
    "gguf_iq2_s": BlockType(256, 82, 16, _iq2_s),
    "gguf_iq2_xs": BlockType(256, 74, 16, _iq2_xs),
    "gguf_iq2_xxs": BlockType(256, 66, 32, _iq2_xxs),
    "gguf_iq1_m": BlockType(256, 56, 16, _iq1_m),
    "gguf_iq1_s": BlockType(256, 50, 32, _iq1_s),
}


def _half(blocks: Bytes, at: int) -> Float32:
    column = np.ascontiguousarray(blocks[:, at : at + 2])
    return column.view("<f2").astype(np.float32)


def _nibbles(packed: Bytes, apart: int) -> Bytes:
    """Return 4-bit codes [n, 2 * bytes]; a byte has the elements i and i + `apart`."""
    bytes_of = packed.reshape(len(packed), -1, 1, apart)
    both = np.concatenate([bytes_of & 15, bytes_of >> 4], axis=2)
    return both.reshape(len(packed), -1)


def _shifted(packed: Bytes, shifts: Any, mask: int) -> Bytes:
    """All bytes of a block, shifted right by the first of `shifts`; then by the next, and so on."""
    by = np.array(shifts, np.uint8)[:, None]
    return ((packed[:, None, :] >> by) & np.uint8(mask)).reshape(len(packed), -1)


def _twos(packed: Bytes) -> Bytes:
    """Return 256 two-bit codes from 64 bytes: each half of the bytes has 128 codes."""
    return _shifted(packed.reshape(-1, 32), (0, 2, 4, 6), 3).reshape(len(packed), -1)


def _fifth_bits(packed: Bytes) -> Bytes:
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _six_bit_factors(blocks: Bytes) -> tuple[Float32, Float32]:
    """Return (scales, negated minimums), both [n, 8], from the 6-bit numbers of Q4_K and Q5_K."""
    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, rest & 15 | first >> 6 << 4], axis=1)
    leasts = np.concatenate([second & 63, rest >> 4 | second >> 6 << 4], axis=1)
    scale = _half(blocks, 0) * scales.astype(np.float32)
    return scale, -(_half(blocks, 2) * leasts.astype(np.float32))
