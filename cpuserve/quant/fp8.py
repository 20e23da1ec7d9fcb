"""FP8 checkpoints (DeepSeek V3 and V4, Qwen3-FP8): E4M3 with a scale per block, row or matrix.

A matrix of n outputs and k inputs is stored as weight F8_E4M3 [n, k]; w = scale * value.
The scales are in weight_scale_inv or in weight_scale. weight_scale_inv has one scale
for each block of weight_block_size (usually 128 x 128): its shape is [n / 128, k / 128],
rounded up. weight_scale has one number, or one for each row. The scales of activations
(input_scale) are not used, because this server does not round activations to FP8.

The experts of DeepSeek V4 are MXFP4: weight I8 [n, k / 2] has two codes E2M1 in a byte, the first
one in the low bits, and weight_scale_inv F8_E8M0 [n, k / 32] has a power of two for 32 inputs.
Source: the loader in vLLM for its files.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from cpuserve.base.errors import ModelError
from cpuserve.quant.float_rows import BLOCK, WHOLE, e4m3, f8_rows
from cpuserve.quant.packed import PackedWeights, floats, rebuilt
from cpuserve.quant.registry import weight_format
from cpuserve.quant.rows import SMALL, mxfp4_rows

if TYPE_CHECKING:
    import numpy.typing as npt

    from cpuserve.quant.base import BuiltTensor, Weights
    from cpuserve.quant.stored import StoredTensor, TensorStore

    Bytes = npt.NDArray[np.uint8]
    Float32 = npt.NDArray[np.float32]

FP8, PAIRS = "F8_E4M3", "I8"
WHY = "FP8 weights whose blocks are not multiples of 128 inputs"


@weight_format("fp8")
def fp8_weights(store: TensorStore, config: dict[str, Any]) -> Weights:
    """Return the weights of an FP8 checkpoint; ModelError if weight_block_size is wrong."""
    settings = config.get("quantization_config") or {}
    block = settings.get("weight_block_size")
    return Fp8Weights(store, None if block is None else block_sizes("weight_block_size", block))


def block_sizes(setting: str, found: Any) -> tuple[int, int]:
    """Return the (outputs, inputs) of a setting; ModelError if they are not two positive numbers.

    setting: its name, for the message.
    """
    ok = isinstance(found, list) and len(found) == 2
    if not ok or not all(type(size) is int and 0 < size < 1 << 31 for size in found):
        msg = f"{setting} is {found!r:.60}, but it must be two positive numbers below 2^31"
        raise ModelError(msg)
    return found[0], found[1]


class Fp8Weights(PackedWeights):
    """Weights with matrices stored as weight, and weight_scale_inv or weight_scale."""

    leaders = (("weight", FP8), ("weight", PAIRS))
    parts = ("weight", "weight_scale_inv", "weight_scale", "input_scale")

    def __init__(self, store: TensorStore, block: tuple[int, int] | None) -> None:
        """block: (outputs, inputs) that share a scale in weight_scale_inv."""
        super().__init__(store)
        self._block = block

    def rebuild(self, name: str, stem: str) -> BuiltTensor:
        """Return the matrix with its stored codes, or in fp32 (see `fp8_matrix`)."""
        if self.part(stem, "weight").dtype == PAIRS:
            return self._pairs(name, stem)
        by_block = self.has(stem, "weight_scale_inv")
        part = "weight_scale_inv" if by_block else "weight_scale"
        return fp8_matrix(self, name, stem, part, self._block)

    def _pairs(self, name: str, stem: str) -> BuiltTensor:
        """Return an MXFP4 matrix; ModelError if its scales do not fit."""
        stored, scales = self.part(stem, "weight"), self.part(stem, "weight_scale_inv")
        n, half = matrix_shape(stored)
        groups = 2 * half // SMALL
        if scales.dtype != "F8_E8M0" or scales.shape != (n, groups) or 2 * half % SMALL:
            msg = (
                f"{stored.name} is {stored.dtype} {[n, half]}, with scales {scales.dtype} "
                f"{list(scales.shape)}; pairs of 4-bit codes need F8_E8M0 for each {SMALL} inputs"
            )
            raise ModelError(msg)
        return mxfp4_matrix(self, name, stem, "weight_scale_inv")


def fp8_matrix(
    weights: PackedWeights,
    name: str,
    stem: str,
    part: str,
    block: tuple[int, int] | None,
    codes: str = "weight",
) -> BuiltTensor:
    """Return an FP8 matrix in rows of e4m3_g128, which keep its codes, or in fp32.

    Rows of e4m3_g128 need a number of inputs that 32 divides, and a scale for a whole row
    or for a multiple of 128 inputs. Other matrices are converted to fp32.

    part: the suffix of the tensor with the scales.
    block: (outputs, inputs) that share a scale.
    codes: the suffix of the tensor with the codes.
    """
    weight, scales = weights.part(stem, codes), weights.part(stem, part)
    n, k = matrix_shape(weight)
    columns = k if math.prod(scales.shape) in (1, n) or block is None else block[1]
    if k % WHOLE or (columns % BLOCK and columns < k):
        return weights.converted(
            name, stem, (n, k), lambda rows: scaled(weight, floats(scales), block, rows), WHY
        )

    def build(rows: slice) -> Bytes:
        scale, each = by_rows(weight, floats(scales), block, rows)
        groups = np.arange(-(-k // BLOCK)) * BLOCK // each
        return f8_rows(weight.data.reshape(n, k)[rows], scale[:, groups])

    return rebuilt(name, (n, k), "e4m3_g128", build, weights.release(stem))


def mxfp4_matrix(
    weights: PackedWeights, name: str, stem: str, part: str, codes: str = "weight"
) -> BuiltTensor:
    """Return an MXFP4 matrix of pairs of codes, with the codes in the order of GGUF blocks.

    part, codes: the suffixes of the tensors with the scales, and with the codes.
    """
    stored, scales = weights.part(stem, codes), weights.part(stem, part)
    n, half = matrix_shape(stored)

    def build(rows: slice) -> Bytes:
        exponents = scales.data.reshape(n, -1)[rows]
        return mxfp4_rows(stored.data.reshape(n, half)[rows], exponents)

    return rebuilt(name, (n, 2 * half), "gguf_mxfp4", build, weights.release(stem))


def matrix_shape(tensor: StoredTensor) -> tuple[int, int]:
    """Return the shape [n, k] of a matrix; ModelError if the tensor is not a matrix."""
    if len(tensor.shape) != 2:
        msg = f"{tensor.name} has shape {list(tensor.shape)}, but a quantized matrix has two"
        raise ModelError(msg)
    return tensor.shape[0], tensor.shape[1]


def scaled(
    weight: StoredTensor, scale: Float32, block: tuple[int, int] | None, rows: slice
) -> Float32:
    """Return some rows [rows, k] of a matrix in fp32; scale and block: see `by_rows` below."""
    n, k = matrix_shape(weight)
    factors, columns = by_rows(weight, scale, block, rows)
    values = e4m3(weight.data.reshape(n, k)[rows])
    return values * np.repeat(factors, columns, axis=1)[:, :k]


def by_rows(
    weight: StoredTensor, scale: Float32, block: tuple[int, int] | None, some: slice
) -> tuple[Float32, int]:
    """Return (the scales [some, blocks] of some rows, the number of inputs that share a scale).

    scale: the scales of the matrix [n, k]: one number,
      [n, 1] with one for each row, or [n / rows, k / columns], rounded up, with one for each block.
    block: (rows, columns) of a block.

    Raises:
        ModelError: scale has none of these shapes.
    """
    n, k = matrix_shape(weight)
    if scale.size == 1:
        return np.broadcast_to(scale.reshape(1, 1), (some.stop - some.start, 1)), k
    if scale.size == n and scale.ndim <= 2 and scale.shape[0] == n:
        return scale.reshape(n, 1)[some], k
    rows, columns = block or (0, 0)
    if block is None or scale.shape != (-(-n // rows), -(-k // columns)):
        msg = (
            f"{weight.name} is {n} x {k}, but its scales are {list(scale.shape)}; they must be one "
            "number, one for each row, or one for each block of weight_block_size"
        )
        raise ModelError(msg)
    return scale[np.arange(some.start, some.stop) // rows], columns
