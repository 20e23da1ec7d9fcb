"""torchao checkpoints: int4, int8, 1 to 8 bits, FP8, MX and NVFP4, in safetensors files.

The header of a file has the type of each matrix X.weight, with the parts X._weight_*.

Int4Tensor                qdata [n, k / 2], the first code in the low half; scale and zero_point
                          [k / group, n]; w = scale * code + zero_point, codes from -8 to 7
Int4PlainInt32Tensor      qdata int32 [n, k / 8], the first code in the lowest bits; scale and
                          zero_point int8 [k / group, n]; w = scale * (code - zero_point)
Int4TilePackedTo4dTensor  qdata int32 [n / 8, k / 128, 32, 4]: tiles of a tensor core, with inputs
                          padded to 1024; scale_and_zero [k / group, n, 2];
                          w = scale * (code - 8) + zero
Int8Tensor                qdata int8 [n, k], scale [n, groups], zero_point int8 or none
IntxUnpackedToInt8Tensor  the same, with codes of target_dtype (int1 to int8)
Float8Tensor              qdata F8_E4M3 [n, k], scale for the matrix, each row or each block
NVFP4Tensor               qdata [n, k / 2] of E2M1, scale F8_E4M3 for 16, and per_tensor_scale
MXTensor                  qdata F8_E4M3 [n, k] or [n, k / 2] of E2M1, scale F8_E8M0 for 32

Scales of the last two may be swizzled: tiles of 128 x 4, with rows r, r + 32 ... side by side.
The codes are in tiles as on CUDA (pytorch, int4mm.cu). Files that were packed on GPUs of
AMD have other tiles in the same shape; their headers do not say so.
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from cpuserve.base.errors import ModelError
from cpuserve.quant.codes import GROUP
from cpuserve.quant.float_rows import SMALL, WHOLE, e4m3, mx_values, nvfp4_rows
from cpuserve.quant.fp8 import FP8, fp8_matrix, matrix_shape
from cpuserve.quant.packed import (
    EIGHT,
    FOUR,
    SIGN,
    IntWeights,
    column_floats,
    floats,
    rebuilt,
    shown,
    unpack,
    words,
)
from cpuserve.quant.registry import weight_format
from cpuserve.quant.rows import (
    E2M1,
    affine_rows,
    few_bits_source,
    int8_rows,
    int_rows,
    join_bits,
    mxfp4_rows,
    spread_bits,
)
from cpuserve.quant.stored import TensorStore

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from cpuserve.program.weight_kinds import SourceType
    from cpuserve.quant.base import BuiltTensor, Weights

    Bytes = npt.NDArray[np.uint8]
    Float32 = npt.NDArray[np.float32]

REMEDY = "use the unquantized checkpoint with --quantization int4 or int8"
PLAIN = "Tensor"
MX_GROUP = 32
LANES = (8, 4)  # outputs and pairs of inputs of a tile of codes
TILE_INPUTS = 16  # inputs of such a tile; a word has codes of two tiles
WORD = 8  # codes of 4 bits in a word
TILE = (128, 4)  # scales of a tile, when they are swizzled
NIBBLES = np.uint8(0x88)  # adds 8 to two codes from -8 to 7


@runtime_checkable
class Described(TensorStore, Protocol):
    """A store of files with headers that describe their tensors."""

    def metadata(self) -> dict[str, str]:
        """Return the texts in the headers; keys that are names of tensors are renamed."""


@weight_format("torchao")
def torchao_weights(store: TensorStore, config: dict[str, Any]) -> Weights:  # noqa: ARG001
    """Return the weights of a torchao checkpoint; ModelError for a type that is not supported."""
    found = store.metadata() if isinstance(store, Described) else {}
    return TorchaoWeights(store, _types(found))


def _types(metadata: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return the description of each quantized tensor, by its stem."""
    found: dict[str, dict[str, Any]] = {}
    for name, text in metadata.items():
        if "." not in name:
            continue
        try:
            about = json.loads(text)
        except (ValueError, RecursionError):
            continue
        kind = about.get("_type") if isinstance(about, dict) else None
        if kind in (None, PLAIN):
            continue
        data = about.get("_data")
        if kind not in KINDS or not name.endswith(".weight") or not isinstance(data, dict):
            msg = (
                f"torchao tensor {name:.80} of type {shown(kind)} is not supported; supported are "
                f"linear weights of type {', '.join(KINDS)}; {REMEDY}"
            )
            raise ModelError(msg)
        found[name.removesuffix("weight")] = {**data, "type": kind}
    if not found:
        msg = (
            "the config says torchao, but the headers of the safetensors files describe no "
            f"quantized tensors; {REMEDY}"
        )
        raise ModelError(msg)
    return found


class TorchaoWeights(IntWeights):
    """Weights with matrices in the types above."""

    leaders = tuple(("_weight_qdata", dtype) for dtype in ("I8", "U8", "I32", FP8))
    parts = tuple(
        f"_weight_{part}"
        for part in (
            *("qdata", "scale", "zero_point", "scale_and_zero"),
            *("per_tensor_scale", "act_pre_scale"),
        )
    )

    def __init__(self, store: TensorStore, types: dict[str, dict[str, Any]]) -> None:
        """types: the description of each quantized matrix, by its stem."""
        self._types = types
        super().__init__(store)

    def is_quantized(self, stem: str) -> bool:
        """Whether the matrix is described; ModelError if not, because its type is not known."""
        if stem not in self._types:
            msg = f"no header describes the type of {stem}weight, whose parts are stored; {REMEDY}"
            raise ModelError(msg)
        return True

    def rebuild(self, name: str, stem: str) -> BuiltTensor:
        """Return the matrix in the source type that fits its type."""
        if self.has(stem, "_weight_act_pre_scale"):
            msg = f"{stem}weight has act_pre_scale: scaled activations are not supported; {REMEDY}"
            raise ModelError(msg)
        return KINDS[self._types[stem]["type"]](self, name, stem)

    def _refuse(self, stem: str, why: str) -> ModelError:
        stored = self.part(stem, "_weight_qdata")
        return ModelError(
            f"{stem}weight is {self._types[stem]['type']} with codes {stored.dtype} "
            f"{list(stored.shape)}, {why}; {REMEDY}"
        )

    def layout(self, stem: str) -> tuple[int, int, int]:
        """Return the number of outputs, of inputs, and of groups of inputs of an integer matrix."""
        n, k = matrix_shape(self.part(stem, "_weight_qdata"))
        scales = self.part(stem, "_weight_scale").shape
        count = math.prod(scales)
        groups = count // n if count % n == 0 else 1
        fits = count == 1 or (groups > 0 and scales in ((n, groups), (n * groups,)))
        if not fits or k % max(groups, 1):
            raise self._refuse(stem, f"which does not fit its scales {list(scales)}")
        return n, k, groups or 1

    def packed(self, stem: str, rows: slice) -> Bytes:
        """Return the codes [rows, k * bits / 8], lowest bits first."""
        bits = self._bits(stem)
        codes = self._codes(stem, rows)
        if codes.max(initial=0) >> bits:
            raise self._refuse(stem, f"with codes of more than {bits} bits")
        return join_bits(codes, bits)

    def scale(self, stem: str, rows: slice) -> Float32:
        """The scales [rows, groups]."""
        n, _, groups = self.layout(stem)
        scales = floats(self.part(stem, "_weight_scale")).reshape(-1, groups)
        return np.broadcast_to(scales, (n, groups))[rows]

    def zero(self, stem: str, rows: slice) -> Float32:
        """The zero points [rows, groups], for codes from 0."""
        n, _, groups = self.layout(stem)
        least = np.float32(1 << (self._bits(stem) - 1))
        if not self.has(stem, "_weight_zero_point"):
            return np.full((n, groups), least, np.float32)[rows]
        stored = self.part(stem, "_weight_zero_point")
        if stored.dtype != "I8" or math.prod(stored.shape) not in (1, n * groups):
            why = f"with zero points {stored.dtype} {list(stored.shape)}"
            raise self._refuse(stem, why)
        points = stored.data.view(np.int8).astype(np.float32).reshape(-1, groups) + least
        return np.broadcast_to(points, (n, groups))[rows]

    def _bits(self, stem: str) -> int:
        """Return the bits of the codes of an integer matrix as they are kept: 2, 3, 4 or 8."""
        about = self._types[stem].get("target_dtype") or {}
        target = about.get("_data") if isinstance(about, dict) else None
        match = re.fullmatch(r"int([1-8])", str(target or "int8"))
        if match is None:
            raise self._refuse(stem, f"of target_dtype {shown(target, 20)}")
        return next(bits for bits in (2, 3, 4, EIGHT) if bits >= int(match[1]))

    def _codes(self, stem: str, rows: slice) -> Bytes:
        """Return the codes [rows, k] of an integer matrix, counted from 0."""
        stored = self.part(stem, "_weight_qdata")
        codes = stored.data.reshape(stored.shape)[rows]
        return codes + np.uint8(1 << (self._bits(stem) - 1))

    def _int(self, name: str, stem: str) -> BuiltTensor:
        """Return a matrix of integers."""
        n, k, groups = self.layout(stem)
        if self.part(stem, "_weight_qdata").dtype != "I8":
            raise self._refuse(stem, "which must be I8")
        bits = self._bits(stem)
        whole = bits == EIGHT and groups == 1
        if whole and self._all_zeros_are(stem, SIGN):

            def build(rows: slice) -> Bytes:
                q = (self._codes(stem, rows) ^ np.uint8(SIGN)).view(np.int8)
                return int8_rows(q, self.scale(stem, rows))

            return rebuilt(name, (n, k), "s8_channel", build, self.release(stem))
        if bits < EIGHT and k // groups % MX_GROUP:
            bits = EIGHT
        return self.from_codes(name, stem, lambda rows: self._codes(stem, rows), None, bits)

    def _int4(self, name: str, stem: str) -> BuiltTensor:
        """Return a matrix of packed 4-bit codes; its zero points are values."""
        stored, scales = (self.part(stem, f"_weight_{part}") for part in ("qdata", "scale"))
        zeros = self.part(stem, "_weight_zero_point")
        n, half = matrix_shape(stored)
        k, groups = 2 * half, scales.shape[0] if scales.shape else 0
        fits = scales.shape == zeros.shape == (groups, n) and groups and k % groups == 0
        if not fits or k // groups % MX_GROUP:
            raise self._refuse(stem, f"which does not fit its scales {list(scales.shape)}")
        source: SourceType = "gguf_q4_1" if k // groups % GROUP else "u4m_g128"

        def build(rows: slice) -> Bytes:
            codes = stored.data.reshape(n, half)[rows] ^ NIBBLES
            scale, middle = (column_floats(part, rows).T for part in (scales, zeros))
            return affine_rows(codes, scale, middle - np.float32(8) * scale, source)

        return rebuilt(name, (n, k), source, build, self.release(stem))

    def _int4_words(self, name: str, stem: str) -> BuiltTensor:
        """Return a matrix of 4-bit codes in words, with integers as zero points."""
        stored, scales = (self.part(stem, f"_weight_{part}") for part in ("qdata", "scale"))
        zeros = self.part(stem, "_weight_zero_point")
        n, k = matrix_shape(stored)
        k, groups = WORD * k, scales.shape[0] if scales.shape else 0
        if zeros.dtype != "I8":
            why = f"with zero points {zeros.dtype}, as for NPUs; they must be I8"
            raise self._refuse(stem, why)
        if scales.shape != (groups, n) or zeros.shape != (groups, n):
            raise self._refuse(stem, f"which does not fit its scales {list(scales.shape)}")
        source = few_bits_source(k, groups, FOUR, symmetric=False, name=name)

        def build(rows: slice) -> Bytes:
            points = zeros.data.reshape(groups, n)[:, rows].T.astype(np.float32)
            codes = words(stored)[rows].view(np.uint8)
            return int_rows(codes, column_floats(scales, rows).T, points, source)

        return rebuilt(name, (n, k), source, build, self.release(stem))

    def _int4_tiles(self, name: str, stem: str) -> BuiltTensor:
        """Return a matrix of 4-bit codes in tiles; its zero points are values."""
        stored, both = (self.part(stem, f"_weight_{part}") for part in ("qdata", "scale_and_zero"))
        about, tiles = self._types[stem], stored.shape
        sizes = (*(about.get("shape") or ()), *(about.get("block_size") or ()))
        if len(sizes) != 4 or not all(map(_natural, sizes)) or len(tiles) != 4:
            raise self._refuse(stem, f"of shape and block_size {shown(sizes, 60)}")
        n, k, _, group = sizes
        rows, width = tiles[0] * LANES[0], tiles[1] * tiles[3] * 2 * TILE_INPUTS
        fits = tiles[2] == math.prod(LANES) and n <= rows and k <= width
        if not fits or both.shape != (width // group, rows, 2) or group % MX_GROUP or k % MX_GROUP:
            raise self._refuse(stem, f"which does not fit its scales {list(both.shape)}")
        each = MX_GROUP if group % GROUP or k % GROUP else GROUP
        source: SourceType = "gguf_q4_1" if each == MX_GROUP else "u4m_g128"

        def build(some: slice) -> Bytes:
            outer = slice(some.start // LANES[0], -(-some.stop // LANES[0]))
            codes = tile_codes(words(stored)[outer])[: some.stop - some.start, :k]
            found = np.repeat(column_floats(both, some), group // each, axis=0)[: k // each]
            scale, middle = np.ascontiguousarray(found.transpose(2, 1, 0))
            least = middle - np.float32(8) * scale
            return affine_rows(join_bits(codes, FOUR), scale, least, source)

        return rebuilt(name, (n, k), source, build, self.release(stem))

    def _fp8(self, name: str, stem: str) -> BuiltTensor:
        """Return an FP8 matrix."""
        n, k = matrix_shape(self.part(stem, "_weight_qdata"))
        block = self._types[stem].get("block_size")
        if not isinstance(block, list) or len(block) != 2 or not all(map(_natural, block)):
            raise self._refuse(stem, f"in blocks of {shown(block)}")
        if self.leader(stem)[1] != FP8:
            raise self._refuse(stem, f"which must be {FP8}")
        sizes = min(block[0], n), min(block[1], k)
        return fp8_matrix(self, name, stem, "_weight_scale", sizes, "_weight_qdata")

    def _small_scales(self, stem: str, groups: int) -> Bytes:
        """Return the bytes of the scales [n, groups] of an MX or NVFP4 matrix."""
        n, _ = matrix_shape(self.part(stem, "_weight_qdata"))
        scales = self.part(stem, "_weight_scale")
        if not self._types[stem].get("is_swizzled_scales"):
            if math.prod(scales.shape) != n * groups:
                raise self._refuse(stem, f"which does not fit its scales {list(scales.shape)}")
            return scales.data.reshape(n, groups)
        down, across = -(-n // TILE[0]), -(-groups // TILE[1])
        if math.prod(scales.shape) != down * across * math.prod(TILE):
            raise self._refuse(stem, f"which does not fit its scales {list(scales.shape)}")
        tiles = scales.data.reshape(down, across, 32, 4, TILE[1]).transpose(0, 3, 2, 1, 4)
        return np.ascontiguousarray(tiles.reshape(down * TILE[0], -1)[:n, :groups])

    def _nvfp4(self, name: str, stem: str) -> BuiltTensor:
        """Return an NVFP4 matrix, with its stored codes if 32 divides its inputs, or converted."""
        n, half = matrix_shape(self.part(stem, "_weight_qdata"))
        stored, k = self.part(stem, "_weight_qdata"), 2 * half
        fits = stored.dtype == "U8" and k % SMALL == 0
        if not fits or self.part(stem, "_weight_scale").dtype != FP8:
            raise self._refuse(stem, "which does not fit its scales")
        total = np.ones(1, np.float32)
        if self.has(stem, "_weight_per_tensor_scale"):
            total = floats(self.part(stem, "_weight_per_tensor_scale")).reshape(-1)
        if total.size != 1:
            raise self._refuse(stem, f"with {total.size} scales of the matrix")

        def pairs(rows: slice) -> Bytes:
            return stored.data.reshape(n, half)[rows]

        def build(rows: slice) -> Bytes:
            return nvfp4_rows(pairs(rows), self._small_scales(stem, k // SMALL)[rows], total)

        def values(rows: slice) -> Float32:
            scale = e4m3(self._small_scales(stem, k // SMALL)[rows])[..., None] * total
            found = E2M1[spread_bits(pairs(rows), 4)].reshape(len(scale), -1, SMALL)
            return (found * scale).reshape(-1, k)

        self._small_scales(stem, k // SMALL)
        if k % WHOLE:
            why = f"NVFP4 weights of a number of inputs that {WHOLE} does not divide"
            return self.converted(name, stem, (n, k), values, why)
        return rebuilt(name, (n, k), "nvfp4", build, self.release(stem))

    def _mx(self, name: str, stem: str) -> BuiltTensor:
        """Return an MX matrix: E2M1 with its stored codes, and FP8 converted."""
        stored, scales = (self.part(stem, f"_weight_{part}") for part in ("qdata", "scale"))
        n, width = matrix_shape(stored)
        k = width if stored.dtype == FP8 else 2 * width
        group = self._types[stem].get("block_size")
        fits = scales.dtype in ("F8_E8M0", "U8") and group == MX_GROUP and k % MX_GROUP == 0
        if not fits or stored.dtype not in (FP8, "U8"):
            why = f"with scales {scales.dtype} for {shown(group, 20)} inputs"
            raise self._refuse(stem, why)
        if stored.dtype == "U8" and "float4" not in str(self._types[stem].get("elem_dtype")):
            raise self._refuse(stem, f"of {shown(self._types[stem].get('elem_dtype'), 60)}")

        def exponents(rows: slice) -> Bytes:
            return self._small_scales(stem, k // MX_GROUP)[rows]

        def build(rows: slice) -> Bytes:
            return mxfp4_rows(stored.data.reshape(n, width)[rows], exponents(rows))

        def values(rows: slice) -> Float32:
            return mx_values(e4m3(stored.data.reshape(n, k)[rows]), exponents(rows))

        exponents(slice(0, n))
        if stored.dtype == FP8:
            return self.converted(name, stem, (n, k), values, "MX scales of FP8 codes")
        return rebuilt(name, (n, k), "gguf_mxfp4", build, self.release(stem))


def tile_codes(tiles: npt.NDArray[np.uint32]) -> Bytes:
    """Return the codes [8 * n, 32 * m * w] of words in tiles [n, m, 32, w].

    Lane 4 * r + c has the inputs 2 * c and 2 * c + 1 of row r of each run of 8 inputs, and a word
    has them for four runs: the even inputs in its low half, the odd ones in its high half.
    """
    n, m, _, w = tiles.shape
    codes = unpack(tiles).reshape(n, m, *LANES, w, 2, 4)
    return codes.transpose(0, 2, 1, 4, 6, 3, 5).reshape(n * LANES[0], -1)


def _natural(value: Any) -> bool:
    return type(value) is int and value > 0


if TYPE_CHECKING:
    Kind = Callable[[TorchaoWeights, str, str], BuiltTensor]

KINDS: dict[str, Kind] = {
    "Int4Tensor": TorchaoWeights._int4,
    "Int4PlainInt32Tensor": TorchaoWeights._int4_words,
    "Int4TilePackedTo4dTensor": TorchaoWeights._int4_tiles,
    "Int8Tensor": TorchaoWeights._int,
    "IntxUnpackedToInt8Tensor": TorchaoWeights._int,
    "Float8Tensor": TorchaoWeights._fp8,
    "NVFP4Tensor": TorchaoWeights._nvfp4,
    "MXTensor": TorchaoWeights._mx,
}
