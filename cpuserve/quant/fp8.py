"""FP8 checkpoints (DeepSeek V3, Qwen3-FP8): E4M3 with a scale for each block or matrix.

weight F8_E4M3 [n, k]; weight_scale_inv [n / 128, k / 128] for blocks of weight_block_size, or
weight_scale, one number; w = scale * value. Scales of activations (input_scale) are not used, as
activations are not rounded to FP8 here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cpuserve.errors import ModelError
from cpuserve.quant.packed import PackedWeights, floats
from cpuserve.quant.registry import weight_format

if TYPE_CHECKING:
    import numpy.typing as npt

    from cpuserve.quant.base import BuiltTensor, Weights
    from cpuserve.quant.stored import StoredTensor, TensorStore

    Float32 = npt.NDArray[np.float32]

FP8 = "F8_E4M3"
WHY = "FP8 weights"


@weight_format("fp8")
def fp8_weights(store: TensorStore, config: dict[str, Any]) -> Weights:
    """Weights of an FP8 checkpoint; ModelError for blocks that are not two positive numbers."""
    settings = config.get("quantization_config") or {}
    block = settings.get("weight_block_size")
    if block is not None:
        ok = isinstance(block, list) and len(block) == 2
        if not ok or not all(type(size) is int and size > 0 for size in block):
            msg = f"weight_block_size is {block!r:.60}, but it must be two positive numbers"
            raise ModelError(msg)
    return Fp8Weights(store, None if block is None else (block[0], block[1]))


class Fp8Weights(PackedWeights):
    """Weights whose matrices are stored as weight, and weight_scale_inv or weight_scale."""

    leaders = (("weight", FP8),)
    parts = ("weight", "weight_scale_inv", "weight_scale", "input_scale")

    def __init__(self, store: TensorStore, block: tuple[int, int] | None) -> None:
        """block: (outputs, inputs) that share a scale of weight_scale_inv."""
        super().__init__(store)
        self._block = block

    def rebuild(self, name: str, stem: str) -> BuiltTensor:
        """The matrix in fp32."""
        n, k = matrix_shape(self.part(stem, "weight"))

        def values() -> Float32:
            by_block = self.has(stem, "weight_scale_inv")
            scale = floats(self.part(stem, "weight_scale_inv" if by_block else "weight_scale"))
            return scaled(self.part(stem, "weight"), scale, self._block)

        return self.converted(name, stem, (n, k), values, WHY)


def matrix_shape(tensor: StoredTensor) -> tuple[int, int]:
    """The shape [n, k] of a matrix; ModelError if it is none."""
    if len(tensor.shape) != 2:
        msg = f"{tensor.name} has shape {list(tensor.shape)}, but a quantized matrix has two"
        raise ModelError(msg)
    return tensor.shape[0], tensor.shape[1]


def scaled(weight: StoredTensor, scale: Float32, block: tuple[int, int] | None = None) -> Float32:
    """E4M3 values [n, k] times their scales, in fp32.

    scale: one number, one for each row [n, 1], or one for each block [n / rows, k / columns],
    rounded up. block: (rows, columns).

    Raises:
        ModelError: scale has none of these shapes.
    """
    n, k = matrix_shape(weight)
    values = e4m3(weight.data).reshape(n, k)
    if scale.size == 1:
        return values * scale.reshape(())
    if scale.size == n and scale.ndim <= 2 and scale.shape[0] == n:
        return values * scale.reshape(n, 1)
    rows, columns = block or (0, 0)
    if block is None or scale.shape != (-(-n // rows), -(-k // columns)):
        msg = (
            f"{weight.name} is {n} x {k}, but its scales are {list(scale.shape)}; they must be one "
            "number, one for each row, or one for each block of weight_block_size"
        )
        raise ModelError(msg)
    for i, factors in enumerate(scale):
        values[i * rows : (i + 1) * rows] *= np.repeat(factors, columns)[:k]
    return values


def e4m3(codes: npt.NDArray[np.uint8]) -> Float32:
    """The values of bytes in FP8 E4M3 (OCP: no infinities, bias 7)."""
    bits = np.arange(256)
    exponent, fraction = bits >> 3 & 15, (bits & 7).astype(np.float32)
    normal = np.ldexp(1 + fraction / 8, exponent - 7)
    magnitude = np.where(exponent > 0, normal, np.ldexp(fraction, -9))
    magnitude[bits & 127 == 127] = np.nan
    table = np.where(bits < 128, magnitude, -magnitude).astype(np.float32)
    return table[codes]
