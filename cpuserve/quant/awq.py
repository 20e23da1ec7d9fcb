"""AWQ checkpoints: 4 bits, with a scale and a zero point per group of inputs.

In the packing "gemm", a matrix of n outputs and k inputs is stored as qweight int32 [k, n / 8],
qzeros int32 [groups, n / 8] and scales fp16 [groups, n]; w = scale * (q - zero).
The eight outputs of an int32 word are stored in the order 0 2 4 6 1 3 5 7, lowest bits first.

In the packing "gemv", qweight is int32 [n, k / 8], qzeros int32 [n, words], and scales fp16
[n, 8 words], with the codes of a word in their own order; the last zero points and scales may be
of no group, so the size of groups is read from the settings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cpuserve.base.errors import ModelError
from cpuserve.quant.packed import (
    IntWeights,
    column_floats,
    expect,
    floats,
    groups_of_columns,
    some_floats,
    unpack,
    words,
)
from cpuserve.quant.registry import weight_format

if TYPE_CHECKING:
    import numpy.typing as npt

    from cpuserve.quant.base import BuiltTensor, Weights
    from cpuserve.quant.stored import StoredTensor, TensorStore

    Words = npt.NDArray[np.uint32]

ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # for output 0, 1 .. 7: the nibble with its code


@weight_format("awq")
def awq_weights(store: TensorStore, config: dict[str, Any]) -> Weights:
    """Return the weights of an AWQ checkpoint; ModelError for other bits or packings."""
    settings = config.get("quantization_config") or {}
    if str(settings.get("version", "gemm")).lower() == "gemv":
        expect(settings, "an AWQ", bits=4, pack_method="reorder")
        group = settings.get("group_size", settings.get("q_group_size", 128))
        if type(group) is not int or not (group == -1 or group > 0):
            expect({"group_size": group}, "an AWQ", group_size="a number of inputs")
        return GemvWeights(store, group)
    packing = str(settings.get("version", "gemm")).lower()
    settings = {**settings, "version": packing}
    expect(settings, "an AWQ", bits=4, version="gemm", pack_method="reorder")
    return AwqWeights(store)


class AwqWeights(IntWeights):
    """Weights with matrices stored as qweight, qzeros and scales, with a column per output."""

    leaders = (("qweight", "I32"),)
    parts = ("qweight", "qzeros", "scales")

    def layout(self, stem: str) -> tuple[int, int, int]:
        """Return the number of outputs, of inputs, and of groups of inputs of a matrix."""
        k, packed = self.part(stem, "qweight").shape
        scales, zeros = self.part(stem, "scales"), self.part(stem, "qzeros")
        return packed * 8, k, groups_of_columns(scales, zeros, packed * 8, packed)

    def packed(self, stem: str, rows: slice) -> npt.NDArray[np.uint8]:
        """Return the 4-bit codes as bytes [rows, k / 2]."""
        return transposed_nibbles(_columns(self.part(stem, "qweight"), rows))

    def scale(self, stem: str, rows: slice) -> npt.NDArray[np.float32]:
        """The scales [rows, groups]."""
        return column_floats(self.part(stem, "scales"), rows).T

    def zero(self, stem: str, rows: slice) -> npt.NDArray[np.float32]:
        """The zero points [rows, groups]."""
        codes = unpack(_columns(self.part(stem, "qzeros"), rows))
        codes = codes.reshape(len(codes), -1, 8)[:, :, ORDER].reshape(len(codes), -1)
        return codes.T.astype(np.float32)


class GemvWeights(IntWeights):
    """Weights with matrices stored as qweight, qzeros and scales, with a row per output."""

    leaders = (("qweight", "I32"),)
    parts = ("qweight", "qzeros", "scales")

    def __init__(self, store: TensorStore, group: int) -> None:
        """group: the number of inputs that share a scale; -1 = all inputs of a matrix."""
        super().__init__(store)
        self._group = group

    def layout(self, stem: str) -> tuple[int, int, int]:
        """Return the number of outputs, of inputs, and of groups of inputs of a matrix."""
        qweight, qzeros, scales = (self.part(stem, part).shape for part in self.parts)
        n, packed = qweight if len(qweight) == 2 else (0, 0)
        k = 8 * packed
        group = k if self._group == -1 else self._group
        groups = k // group if group and k % group == 0 else 0
        fits = len(qzeros) == len(scales) == 2 and qzeros[0] == scales[0] == n
        if not groups or not fits or 8 * qzeros[1] < groups or scales[1] < groups:
            msg = (
                f"{stem}qweight is {list(qweight)}, with qzeros {list(qzeros)} and scales "
                f"{list(scales)}, which do not fit groups of {self._group}"
            )
            raise ModelError(msg)
        return n, k, groups

    def rebuild(self, name: str, stem: str) -> BuiltTensor:
        """Return the matrix; ModelError if its scales show groups of another size.

        Places of no group have scales of 0, and each group has one other than 0.
        """
        _, _, groups = self.layout(stem)
        used = (floats(self.part(stem, "scales")) != 0).sum(axis=0) > 0
        if not used[:groups].all() or used[groups:].any():
            msg = (
                f"{stem}scales are of {int(used.sum())} groups, but group_size = {self._group} "
                f"makes {groups}; correct group_size in config.json"
            )
            raise ModelError(msg)
        return super().rebuild(name, stem)

    def packed(self, stem: str, rows: slice) -> npt.NDArray[np.uint8]:
        """Return the 4-bit codes as bytes [rows, k / 2]; the file stores them in this order."""
        return np.ascontiguousarray(words(self.part(stem, "qweight"))[rows]).view(np.uint8)

    def scale(self, stem: str, rows: slice) -> npt.NDArray[np.float32]:
        """The scales [rows, groups]."""
        return some_floats(self.part(stem, "scales"), rows)[:, : self.layout(stem)[2]]

    def zero(self, stem: str, rows: slice) -> npt.NDArray[np.float32]:
        """The zero points [rows, groups]."""
        codes = unpack(words(self.part(stem, "qzeros"))[rows])
        return codes[:, : self.layout(stem)[2]].astype(np.float32)


def _columns(tensor: StoredTensor, outputs: slice) -> Words:
    """Return the words that have the codes of some outputs; a word has eight codes."""
    return words(tensor)[:, outputs.start // 8 : -(-outputs.stop // 8)]


def transposed_nibbles(words: Words) -> npt.NDArray[np.uint8]:
    """Return 4-bit codes as bytes [8 * m, k / 2], from words [k, m] of eight outputs in ORDER.

    Each 8 x 8 matrix of nibbles (eight inputs, eight outputs) is transposed: its 4 x 4 blocks,
    then its 2 x 2 blocks, then its nibbles are swapped across the diagonal (Hacker's Delight 7-3).
    """
    k, m = words.shape
    parts = np.ascontiguousarray(words.reshape(k // 8, 8, m).transpose(1, 2, 0))
    swap, spare = np.empty_like(parts[0]), np.empty_like(parts[0])
    for distance, mask in ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, 0x0F0F0F0F)):
        shift = np.uint32(4 * distance)
        for i in range(8):
            if i & distance:
                continue
            low, high = parts[i], parts[i + distance]
            np.right_shift(low, shift, out=swap)
            swap ^= high
            swap &= np.uint32(mask)
            high ^= swap
            np.left_shift(swap, shift, out=spare)
            low ^= spare
    rows = np.empty((m, 8, k // 8), "<u4")
    for output, nibble in enumerate(ORDER):
        rows[:, output] = parts[nibble]
    return rows.reshape(8 * m, -1).view(np.uint8)
