"""Weights of a tower: its first matrix takes bytes of pixels.

The checkpoint has a convolution over patches: W [n, channels, patch, patch] and a bias b, which may
be missing. A convolution over frames of a video as well, W [n, channels, frames, patch, patch], is
the sum over its frames, because all frames of a picture are the same. MLX directories have the
channels of convolutions last: [n, patch, patch, channels]. Or the checkpoint has a matrix
[n, numbers of a patch], with the axes of its columns in any order. It takes normalized pixels
(scale p - mean) / sd. The program takes rows of p - 128 in the order (y, x, channel), so the matrix
has the columns in this order, times scale / sd, and the bias makes up for the mean and for 128.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cpuserve.program.operations.patches import MIDDLE, PixelScale
from cpuserve.quant.base import BuiltTensor, QuantTensor
from cpuserve.quant.stored import DENSE_KINDS

if TYPE_CHECKING:
    import numpy.typing as npt

    from cpuserve.program.weight_kinds import WeightKind
    from cpuserve.quant.base import Weights

    Float32 = npt.NDArray[np.float32]


_CHANNELS = 3


class PatchWeights:
    """`Weights` where the convolution `name` is a matrix [n, patch * patch * channels]."""

    def __init__(
        self,
        weights: Weights,
        name: str,
        merge: str,
        pixels: PixelScale,
        patch: int,
        axes: str = "",
        block: int = 1,
    ) -> None:
        """Wrap the weights of a checkpoint.

        merge: a convolution over blocks of patches, which becomes a matrix as well, or already
          is one; "" = none. block: the patches of a side of a block.
        pixels: how the image processor makes a number of a byte.
        patch: the pixels of a side of a patch.
        axes: the axes of the columns if the checkpoint has a matrix (TowerSpec.patch_axes).
        """
        self._weights = weights
        self._merge = f"{merge}.weight" if merge else ""
        self._matrix, self._bias = f"{name}.weight", f"{name}.bias"
        self._pixels = pixels
        self._patch, self._axes, self._block = patch, axes, block

    def names(self) -> set[str]:
        """Return the name of each tensor in the checkpoint, after renaming, and of the bias."""
        return self._weights.names() | {self._bias}

    def get(self, name: str) -> QuantTensor:
        """Return the tensor; the matrix and its bias are built in fp32 when they are read."""
        whole = self._weights.get(self._matrix if name == self._bias else name)
        if name == self._merge:
            return _by_place(whole, self._block)
        if name == self._matrix and (self._axes or len(whole.shape) > 2):
            n, k = whole.shape[0], self._patch**2 * _CHANNELS
            return BuiltTensor(name, (n, k), "f32", n * k * 4, self._rows, whole.release)
        if name == self._bias:

            def build(some: slice) -> npt.NDArray[np.uint8]:
                return self._shifted().reshape(1, -1).view(np.uint8)[some]

            n = whole.shape[0]
            return BuiltTensor(name, (n,), "f32", 4 * n, build, whole.release)
        return whole

    def kind(self, name: str, dtype: str) -> WeightKind:
        """Return the weight kind of the tensor; matrices that were convolutions are dense."""
        convolved = name in (self._matrix, self._merge)
        return DENSE_KINDS[dtype] if convolved else self._weights.kind(name, dtype)

    def _stored(self, rows: slice = slice(None)) -> Float32:
        """Return rows [rows, channels, places] of the convolution, in fp32."""
        from cpuserve.quant import dequantize

        whole = self._weights.get(self._matrix)
        values = dequantize(whole)[rows]
        axes = self._axes or _axes_of(whole.shape)
        sizes = {"c": _CHANNELS, "t": -1, "y": self._patch, "x": self._patch}
        values = values.reshape(len(values), *(sizes[axis] for axis in axes))
        if "t" in axes:
            values = values.sum(axis=1 + axes.index("t"))
        rest = axes.replace("t", "")
        values = values.transpose(0, *(1 + rest.index(axis) for axis in "cyx"))
        return np.asarray(values.reshape(len(values), _CHANNELS, -1), np.float32)

    def _factors(self) -> npt.NDArray[np.float64]:
        return self._pixels.scale / np.asarray(self._pixels.deviation)

    def _rows(self, some: slice) -> npt.NDArray[np.uint8]:
        scaled = self._stored(some) * self._factors()[:, None]
        rows = np.ascontiguousarray(scaled.transpose(0, 2, 1), np.float32)
        return rows.reshape(len(rows), -1).view(np.uint8)

    def _shifted(self) -> Float32:
        from cpuserve.quant import dequantize

        mean, sd = np.asarray(self._pixels.mean), np.asarray(self._pixels.deviation)
        middle = (MIDDLE * self._pixels.scale - mean) / sd  # the number of a byte of 128
        sums = self._stored().astype(np.float64).sum(axis=2) @ middle
        if self._bias in self._weights.names():
            sums = sums + dequantize(self._weights.get(self._bias))
        shifted: Float32 = sums.astype(np.float32)
        return shifted


def _axes_of(shape: tuple[int, ...]) -> str:
    """Return the axes of a convolution over patches after the first: "cyx", "yxc" and so on."""
    places = "yx" if len(shape) == 4 else "tyx"
    last = shape[-1] == _CHANNELS != shape[1]
    return f"{places}c" if last else f"c{places}"


def _by_place(whole: QuantTensor, block: int) -> QuantTensor:
    """Return a convolution [n, width, y, x], or MLX's [n, y, x, width], as a matrix.

    The matrix is [n, y * x * width].

    block: y and x, for a convolution that is stored as a matrix [n, width * y * x].
    """
    from cpuserve.quant import dequantize

    n, *sides = whole.shape
    if len(sides) == 1:
        sides = [sides[0] // block**2, block, block]
    k, last = int(np.prod(sides)), sides[:2] == [block, block] != sides[1:]

    def build(some: slice) -> npt.NDArray[np.uint8]:
        values = dequantize(whole)[some].reshape(-1, *sides)
        values = values if last else values.transpose(0, 2, 3, 1)
        return np.ascontiguousarray(values, np.float32).reshape(-1, k).view(np.uint8)

    return BuiltTensor(whole.name, (n, k), "f32", n * k * 4, build, whole.release)
