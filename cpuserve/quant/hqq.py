"""HQQ checkpoints: codes of 1 to 8 bits with a scale and a zero point, which may be a fraction.

A matrix of n outputs and k inputs is cut into pieces: with axis 1 into rows of group_size weights
that follow each other, with axis 0 into group_size rows; the weights of a row (axis 1) or of a
column (axis 0) share scale and zero; w = scale * (code - zero).

A number in W_q has a code of each part of the rows, with the first part in the highest bits.
packing is the text "8bit_u8", "4bit_u8", "2bit_u8", "1bit_u8" or "3bit_32" (ten in an int32).
The settings of each matrix are stored as tensors, and W_q may be declared as floats.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cpuserve.base.errors import ModelError
from cpuserve.quant.codes import GROUP
from cpuserve.quant.packed import FOUR, MOST_ZERO, IntWeights, floats, rebuilt
from cpuserve.quant.registry import weight_format
from cpuserve.quant.rows import SMALL, affine_rows, join_bits

if TYPE_CHECKING:
    import numpy.typing as npt

    from cpuserve.program.weight_kinds import SourceType
    from cpuserve.quant.base import BuiltTensor, Weights
    from cpuserve.quant.stored import TensorStore

    Bytes = npt.NDArray[np.uint8]
    Float32 = npt.NDArray[np.float32]

REMEDY = "use the unquantized checkpoint with --quantization int4 or int8"
# By packing: the bits of a code, the type of the stored numbers, and the codes in one.
PACKINGS = {
    "8bit_u8": (8, "u1", 1),
    "4bit_u8": (4, "u1", 2),
    "3bit_32": (3, "<u4", 10),
    "2bit_u8": (2, "u1", 4),
    "1bit_u8": (1, "u1", 8),
}
SETTINGS = (
    *("nbits", "group_size", "shape", "axis", "packing", "unpack_view_dtype", "view_as_float"),
    *("quant_scale", "quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict"),
    *("stores_quant_config", "channel_wise", "optimize", "round_zero"),
)
INTEGERS = {"I64": "<i8", "I32": "<i4", "U8": "u1"}


@weight_format("hqq")
def hqq_weights(store: TensorStore, config: dict[str, Any]) -> Weights:  # noqa: ARG001
    """Return the weights of an HQQ checkpoint; its tensors have the settings."""
    return HqqWeights(store)


class _Layout(NamedTuple):
    """How a matrix [n, k] is stored: `rows` x `columns` codes, in fewer rows of numbers."""

    n: int
    k: int
    bits: int
    number: str
    each: int
    axis: int
    rows: int
    columns: int


class HqqWeights(IntWeights):
    """Weights with matrices stored as W_q, scale, zero and settings."""

    leaders = tuple(("W_q", dtype) for dtype in ("U8", "I32", "F16", "BF16", "F32"))
    parts = ("W_q", "scale", "zero", *SETTINGS)

    def rebuild(self, name: str, stem: str) -> BuiltTensor:
        """Return the matrix; codes are kept if a kernel has zero points of this kind."""
        stored = self._stored(stem)
        n, k = stored.n, stored.k
        each = stored.columns
        by_rows = stored.axis == 1 and k % each == 0 and each % SMALL == 0
        if not by_rows:
            return self._converted(name, stem, "scales for other weights than those of one row")
        zero = floats(self.part(stem, "zero"))
        whole = bool((np.rint(zero) == zero).all()) and zero.min() >= 0
        if whole and zero.max() <= MOST_ZERO and stored.bits in (2, 3, FOUR):
            return self._few_bits(name, stem, stored.bits, None)
        if stored.bits != FOUR:
            fractions = "" if whole else " and fractions as zero points"
            return self._converted(name, stem, f"codes of {stored.bits} bits{fractions}")
        source: SourceType = "gguf_q4_1" if each % GROUP else "u4m_g128"

        def build(rows: slice) -> Bytes:
            scale = self.scale(stem, rows)
            least = -self.zero(stem, rows) * scale
            return affine_rows(self.packed(stem, rows), scale, least, source)

        return rebuilt(name, (n, k), source, build, self.release(stem))

    def _converted(self, name: str, stem: str, why: str) -> BuiltTensor:
        stored = self._stored(stem)
        scale, zero = (floats(self.part(stem, part)).reshape(-1) for part in ("scale", "zero"))

        def values(rows: slice) -> Float32:
            at = np.arange(rows.start * stored.k, rows.stop * stored.k)
            row, column = at // stored.columns, at % stored.columns
            shared = row if stored.axis == 1 else column
            codes = self._at(stem, row, column).astype(np.float32)
            found: Float32 = (codes - zero[shared]) * scale[shared]
            return found.reshape(-1, stored.k)

        return self.converted(name, stem, (stored.n, stored.k), values, f"HQQ's {why}")

    def _numbers(self, stem: str, name: str) -> list[int]:
        """Return the integers in a tensor with settings."""
        stored = self.part(stem, name)
        if stored.dtype not in INTEGERS or math.prod(stored.shape) > SMALL:
            msg = f"{stored.name} is {stored.dtype} {list(stored.shape)}, but must be integers"
            raise ModelError(msg)
        return [int(number) for number in stored.data.view(INTEGERS[stored.dtype])]

    def _number(self, stem: str, name: str) -> int:
        """Return the only integer in a tensor with settings; -1 if it has none or several."""
        found = self._numbers(stem, name)
        return found[0] if len(found) == 1 else -1

    def _stored(self, stem: str) -> _Layout:
        """Return how a matrix is stored; ModelError if its tensors do not fit its settings."""
        shape, axis = self._numbers(stem, "shape"), self._number(stem, "axis")
        group = self._number(stem, "group_size")
        packing = "".join(map(chr, self._numbers(stem, "packing")))
        nested = [p for p in ("quant_scale", "quant_zero") if self.has(stem, p)]
        if any(self._number(stem, part) for part in nested):
            msg = f"{stem}weight has quantized scales or zero points: not supported; {REMEDY}"
            raise ModelError(msg)
        known = packing in PACKINGS and axis in (0, 1) and len(shape) == 2
        if not known or group < 1 or min(shape) < 1 or math.prod(shape) % group:
            msg = (
                f"{stem}weight of HQQ packing {packing!r:.40}, shape {shape}, axis {axis} and "
                f"group_size {group} is not supported; {REMEDY}"
            )
            raise ModelError(msg)
        bits, number, each = PACKINGS[packing]
        pieces = math.prod(shape) // group
        rows, columns = (pieces, group) if axis == 1 else (group, pieces)
        size = -(-rows // each) * columns * np.dtype(number).itemsize
        scales = [math.prod(self.part(stem, part).shape) for part in ("scale", "zero")]
        if self.part(stem, "W_q").data.nbytes != size or scales != [pieces, pieces]:
            msg = (
                f"{stem}W_q has {self.part(stem, 'W_q').data.nbytes} bytes and {scales} scales and "
                f"zero points, but its settings need {size} bytes and {pieces}; convert it again"
            )
            raise ModelError(msg)
        return _Layout(shape[0], shape[1], bits, number, each, axis, rows, columns)

    def _at(self, stem: str, rows: npt.NDArray[np.int64], columns: Any) -> npt.NDArray[np.uint32]:
        """Return the codes at these rows and columns of the pieces."""
        stored = self._stored(stem)
        numbers = self.part(stem, "W_q").data.view(stored.number).reshape(-1, stored.columns)
        part = rows // len(numbers)
        shift = (stored.each - 1 - part) * stored.bits
        found = numbers[rows % len(numbers), columns].astype(np.uint32)
        shift = shift if found.ndim == 1 else shift[:, None]
        codes: npt.NDArray[np.uint32] = found >> shift.astype(np.uint32)
        return codes & np.uint32((1 << stored.bits) - 1)

    def layout(self, stem: str) -> tuple[int, int, int]:
        """Return the number of outputs, of inputs, and of groups of inputs of a matrix."""
        stored = self._stored(stem)
        return stored.n, stored.k, stored.k // stored.columns

    def packed(self, stem: str, rows: slice) -> Bytes:
        """Return the codes [rows, k * bits / 8], lowest bits first."""
        _, k, groups = self.layout(stem)
        pieces = np.arange(rows.start * groups, rows.stop * groups)
        codes = self._at(stem, pieces, slice(None)).astype(np.uint8)
        return join_bits(codes.reshape(-1, k), self._stored(stem).bits)

    def scale(self, stem: str, rows: slice) -> Float32:
        """The scales [rows, groups]."""
        n, _, groups = self.layout(stem)
        return floats(self.part(stem, "scale")).reshape(n, groups)[rows]

    def zero(self, stem: str, rows: slice) -> Float32:
        """The zero points [rows, groups]."""
        n, _, groups = self.layout(stem)
        return floats(self.part(stem, "zero")).reshape(n, groups)[rows]
