"""GGUF block formats: blocks of 32 or 256 weights with their scales, and in some types minimums.

Block layouts follow ggml-common.h. A weight is scale * (code - zero) + minimum.
Blocks of 256 weights (the k-quants and IQ4_XS) have an integer scale for each 16 or 32 weights, and
in some types an integer minimum. One fp16 factor multiplies all scales of a block, and another one
all minimums, which are subtracted. The codes of IQ4_NL, IQ4_XS and MXFP4 are indices into a table.
The types that are converted, such as NVFP4, have a file of their own (converted.py).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cpuserve.program.row_formats import CONVERTED_KIND
from cpuserve.program.weight_kinds import SourceType, WeightKind
from cpuserve.quant import dense
from cpuserve.quant.base import BuiltTensor, QuantTensor, Weights
from cpuserve.quant.codes import Codes
from cpuserve.quant.gguf.converted import CONVERTED, NVFP4, Factors, converted, nvfp4_matrix
from cpuserve.quant.gguf.sizes import DECODED
from cpuserve.quant.registry import weight_format
from cpuserve.quant.stored import BY_HEADS, StoredWeights, TensorStore

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
    "MXFP4": "gguf_mxfp4",
    "NVFP4": "nvfp4",
}
SOURCES: dict[str, SourceType] = {
    **dense.SOURCES,
    **QUANTIZED,
    **{dtype: how.source for dtype, how in CONVERTED.items()},
    **dict.fromkeys(DECODED, "f32"),
}
# The number of rows that a thread decodes at a time:
# enough to make the overhead of numpy calls small, and few enough for the caches of the thread.
DECODED_ROWS = 64


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
        if decoded := sorted(found & DECODED.keys()):
            log.warning(
                "%s weights have no kernels and are converted to 8 bits while loading, which takes "
                "minutes for billions of weights; Q2_K, Q3_K and IQ4_XS files take less memory",
                " and ".join(decoded),
            )

    def get(self, name: str) -> QuantTensor:
        """Return the tensor as rows of its source type."""
        tensor, dtype = super().get(name), self._store.dtype(name)
        if dtype in DECODED:
            return decoded(tensor, dtype)
        if dtype == NVFP4:
            return nvfp4_matrix(tensor, self._factors.get(name))
        return converted(tensor, CONVERTED[dtype]) if dtype in CONVERTED else tensor

    def kind(self, name: str, dtype: str) -> WeightKind:
        """Return the weight kind: of the stored type if it is quantized, otherwise of `dtype`."""
        decoded = self._store.dtype(name) in DECODED and not name.endswith(BY_HEADS)
        return CONVERTED_KIND if decoded else super().kind(name, dtype)


def decoded(stored: QuantTensor, dtype: str) -> BuiltTensor:
    """Return the rows of `stored`, a tensor of the GGUF type `dtype` (one of DECODED), in fp32."""
    k = stored.shape[-1]
    size = k // 256 * DECODED[dtype]

    def build(rows: slice) -> Bytes:
        import gguf

        data, order = stored.data.reshape(-1, size), stored.row_order
        wanted = np.arange(len(data))[rows] if order is None else order[rows]
        out = np.empty((len(wanted), k), np.float32)
        kind = gguf.GGMLQuantizationType[dtype]
        for first in range(0, len(out), DECODED_ROWS):  # gguf copies its whole argument
            some = slice(first, first + DECODED_ROWS)
            out[some] = gguf.quants.dequantize(data[wanted[some]], kind)
        return out.view(np.uint8)

    nbytes = 4 * math.prod(stored.shape)
    return BuiltTensor(stored.name, stored.shape, "f32", nbytes, build, stored.release)


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


BLOCKS: dict[SourceType, BlockType] = {
    "gguf_q8_0": BlockType(32, 34, 32, _q8_0),
    "gguf_q4_0": BlockType(32, 18, 32, _q4_0),
    "gguf_q4_1": BlockType(32, 20, 32, _q4_1),
    "gguf_q5_0": BlockType(32, 22, 32, _q5_0),
    "gguf_q5_1": BlockType(32, 24, 32, _q5_1),
    "gguf_iq4_nl": BlockType(32, 18, 32, _iq4_nl),
    "gguf_mxfp4": BlockType(32, 17, 32, _mxfp4),
    "gguf_q2_k": BlockType(256, 84, 16, _q2_k),
    "gguf_q3_k": BlockType(256, 110, 16, _q3_k),
    "gguf_q4_k": BlockType(256, 144, 32, _q4_k),
    "gguf_q5_k": BlockType(256, 176, 32, _q5_k),
    "gguf_q6_k": BlockType(256, 210, 16, _q6_k),
    "gguf_iq4_xs": BlockType(256, 136, 32, _iq4_xs),
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
