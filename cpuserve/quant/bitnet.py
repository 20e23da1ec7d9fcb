"""BitNet checkpoints: ternary matrices, which are -1, 0 or 1 times one scale.

offline  weight uint8 [n / 4, k]: bits 2 i and 2 i + 1 of row r are row r + i * n / 4, plus 1;
         weight_scale, one number: the scale ("autobitlinear"), or 1 / scale ("bitlinear")
online   dense matrices; the scale is the mean of their absolute values

Activations are not rounded to 8 bits. Source: transformers integrations/bitnet.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from cpuserve.base.errors import ModelError
from cpuserve.quant.fp8 import matrix_shape
from cpuserve.quant.packed import IntWeights, expect, floats, some_floats
from cpuserve.quant.registry import weight_format
from cpuserve.quant.rows import join_bits

if TYPE_CHECKING:
    import numpy.typing as npt

    from cpuserve.quant.base import BuiltTensor, Weights
    from cpuserve.quant.stored import TensorStore

    Bytes = npt.NDArray[np.uint8]
    Float32 = npt.NDArray[np.float32]

BITS = 2
TOGETHER = 4  # rows in a row of bytes
GROUPS = (256, 128, 64, 32)  # the scale of a matrix is repeated for each group of inputs
LEAST = 1e-5  # the least scale of dense matrices


@weight_format("bitnet")
def bitnet_weights(store: TensorStore, config: dict[str, Any]) -> Weights:
    """Return the weights of a BitNet checkpoint; ModelError for another kind of linear layer."""
    settings = config.get("quantization_config") or {}
    if settings.get("use_rms_norm", False):
        expect(settings, "a BitNet", use_rms_norm=False)
    if (mode := settings.get("quantization_mode", "offline")) == "online":
        left = settings.get("modules_to_not_convert") or ["lm_head"]
        return OnlineTernary(store, left)
    expect({"quantization_mode": mode}, "a BitNet", quantization_mode="offline")
    kind = settings.get("linear_class", "bitlinear")
    if kind not in ("bitlinear", "autobitlinear"):
        expect({"linear_class": kind}, "a BitNet", linear_class="bitlinear or autobitlinear")
    return PackedTernary(store, inverse=kind == "bitlinear")


class Ternary(IntWeights):
    """Matrices of codes 0, 1 and 2, which mean -1, 0 and 1, and one scale."""

    def layout(self, stem: str) -> tuple[int, int, int]:
        """Return the number of outputs, of inputs, and of groups of inputs of a matrix."""
        n, k = self.shape(stem)
        group = next((g for g in GROUPS if k % g == 0), 0)
        if not group:
            msg = f"{stem}weight has {k} inputs, but BitNet matrices need a multiple of 32"
            raise ModelError(msg)
        return n, k, k // group

    def shape(self, stem: str) -> tuple[int, int]:
        """Return the number of outputs and of inputs of a matrix."""
        raise NotImplementedError

    def factor(self, stem: str) -> float:
        """Return the scale of a matrix."""
        raise NotImplementedError

    def rebuild(self, name: str, stem: str) -> BuiltTensor:
        """Return the matrix of 2-bit codes."""
        return self._few_bits(name, stem, BITS, None)

    def scale(self, stem: str, rows: slice) -> Float32:
        """Return the scales [rows, groups]."""
        n, _, groups = self.layout(stem)
        return np.full((len(range(n)[rows]), groups), self.factor(stem), np.float32)

    def zero(self, stem: str, rows: slice) -> Float32:
        """Return the zero points [rows, groups]."""
        n, _, groups = self.layout(stem)
        return np.ones((len(range(n)[rows]), groups), np.float32)


class PackedTernary(Ternary):
    """Matrices stored as 2-bit codes."""

    leaders = (("weight", "U8"),)
    parts = ("weight", "weight_scale")

    def __init__(self, store: TensorStore, *, inverse: bool) -> None:
        """inverse: weight_scale is 1 / scale."""
        super().__init__(store)
        self._inverse = inverse

    def shape(self, stem: str) -> tuple[int, int]:
        """Return the number of outputs and of inputs of a matrix."""
        rows, k = matrix_shape(self.part(stem, "weight"))
        return rows * TOGETHER, k

    def factor(self, stem: str) -> float:
        """Return the scale of a matrix; ModelError unless one number is stored for it."""
        stored = floats(self.part(stem, "weight_scale")).reshape(-1)
        if stored.size != 1 or not math.isfinite(stored[0]) or stored[0] == 0:
            msg = f"{stem}weight_scale must be one number other than 0"
            raise ModelError(msg)
        return float(1 / stored[0] if self._inverse else stored[0])

    def packed(self, stem: str, rows: slice) -> Bytes:
        """Return the codes [rows, k / 4], lowest bits first."""
        n, k, _ = self.layout(stem)
        wanted = np.arange(n)[rows]
        stored = self.part(stem, "weight").data.reshape(n // TOGETHER, k)
        shift = (wanted // (n // TOGETHER) * BITS).astype(np.uint8)
        codes = stored[wanted % (n // TOGETHER)] >> shift[:, None] & np.uint8(3)
        return join_bits(codes, BITS)


class OnlineTernary(Ternary):
    """Dense matrices, which are rounded to ternary numbers when they are read."""

    leaders = (("weight", "BF16"), ("weight", "F16"), ("weight", "F32"))
    parts = ("weight",)

    def __init__(self, store: TensorStore, left: list[str]) -> None:
        """left: the parts of names of linears that are not quantized."""
        self._left = tuple(left)
        self._factors: dict[str, float] = {}
        super().__init__(store)

    def is_quantized(self, stem: str) -> bool:
        """Whether the matrix is of a linear that is quantized."""
        return stem.endswith("_proj.") and not any(part in stem for part in self._left)

    def shape(self, stem: str) -> tuple[int, int]:
        """Return the number of outputs and of inputs of a matrix."""
        return matrix_shape(self.part(stem, "weight"))

    def factor(self, stem: str) -> float:
        """Return the scale of a matrix, the mean of its absolute values."""
        if stem not in self._factors:
            values = floats(self.part(stem, "weight"))
            self._factors[stem] = max(float(np.abs(values).mean(dtype=np.float64)), LEAST)
        return self._factors[stem]

    def packed(self, stem: str, rows: slice) -> Bytes:
        """Return the codes [rows, k / 4], lowest bits first."""
        values = some_floats(self.part(stem, "weight"), rows) / np.float32(self.factor(stem))
        return join_bits((np.clip(np.rint(values), -1, 1) + 1).astype(np.uint8), BITS)
