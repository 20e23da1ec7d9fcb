"""TensorRT Model Optimizer (modelopt, NVIDIA's): FP8, MXFP8, NVFP4, MXFP4, INT4-AWQ and INT8.

fp8    weight F8_E4M3 [n, k] with weight_scale: one number, one for each row, or for fp8_pb_wo and
       fp8_pb_real one for each block of 128 x 128: [n / 128, k / 128], rounded up, which may have
       an axis of 1 after each of these
mxfp8  weight F8_E4M3 [n, k], weight_scale uint8 [n, k / 32]; a scale is 2^(weight_scale - 127)
mxfp4  weight uint8 [n, k / 2] of E2M1, weight_scale as for mxfp8
nvfp4  weight uint8 [n, k / 2] of E2M1, the first code in the low half; weight_scale F8_E4M3
       [n, k / 16], or [n, k / 32] for W4A8_NVFP4_FP8, and weight_scale_2, one number; a scale is
       weight_scale * weight_scale_2
int4   weight uint8 [n / 2, k] of codes from -8 to 7: a byte has rows 2 i (low half) and 2 i + 1;
       weight_scale [n, groups]; with weight_scale_2 (W4A8_AWQ), which scales the weights to FP8
       for a GPU and is not used
int8   weight int8 [n, k], weight_scale [n]

AWQ and SmoothQuant may multiply the inputs of a matrix by pre_quant_scale [k]. Its columns are
multiplied instead, so such a matrix has no groups with one scale, and becomes int8.

The scales of activations, keys and values are not used. The tensors of a matrix show how it is
stored, so a checkpoint may mix these. Older directories have the settings in hf_quant_config.json.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cpuserve.base.errors import ModelError
from cpuserve.quant.float_rows import SMALL, WHOLE, e4m3, nvfp4_rows
from cpuserve.quant.fp8 import FP8, fp8_matrix, matrix_shape, mxfp4_matrix
from cpuserve.quant.mx import mx_matrix
from cpuserve.quant.packed import IntWeights, floats, rebuilt, shown, some_floats
from cpuserve.quant.registry import weight_format
from cpuserve.quant.rows import E2M1, SYMMETRIC, int8_rows, join_bits, spread_bits
from cpuserve.quant.rows import SMALL as INT_GROUP

if TYPE_CHECKING:
    import numpy.typing as npt

    from cpuserve.quant.base import BuiltTensor, Weights
    from cpuserve.quant.stored import StoredTensor, TensorStore

    Bytes = npt.NDArray[np.uint8]
    Float32 = npt.NDArray[np.float32]

ALGORITHMS = (
    *("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4", "NVFP4_AWQ", "W4A16_AWQ"),
    *("W8A16", "W8A8_SQ_PER_CHANNEL", "MIXED_PRECISION", "W4A8_AWQ", "W4A8_NVFP4_FP8"),
    *("W4A8_MXFP4_FP8", "MXFP8", "mxfp4", "fp8_pb_wo", "fp8_pb_real"),
)
TWICE = ("W4A8_AWQ", "MIXED_PRECISION")  # algorithms with INT4 matrices that have weight_scale_2
BLOCK = (128, 128)  # outputs and inputs that share a scale in matrices of FP8 blocks
REMEDY = "use the unquantized checkpoint with --quantization int4 or int8"
POWERS = ("U8", "F8_E8M0")  # element types of scales that are exponents of 2
SCALED = "inputs that AWQ or SmoothQuant multiply by pre_quant_scale"


@weight_format("modelopt")
def modelopt_weights(store: TensorStore, config: dict[str, Any]) -> Weights:
    """Return the weights of a modelopt checkpoint; ModelError for another algorithm."""
    settings = config.get("quantization_config") or {}
    found = settings.get("quant_algo")
    if found is not None and str(found).upper() not in map(str.upper, ALGORITHMS):
        msg = (
            f"modelopt checkpoint with quant_algo {shown(found)} is not supported, only "
            f"{', '.join(ALGORITHMS)}; {REMEDY}"
        )
        raise ModelError(msg)
    return ModeloptWeights(store, twice=str(found).upper() in TWICE)


class ModeloptWeights(IntWeights):
    """Weights with matrices in the formats above."""

    leaders = (("weight", FP8), ("weight", "U8"), ("weight", "I8"))
    parts = (
        "weight",
        "weight_scale",
        "weight_scale_2",
        "input_scale",
        "pre_quant_scale",
        "k_scale",
        "v_scale",
    )

    def __init__(self, store: TensorStore, *, twice: bool) -> None:
        """twice: matrices of INT4 may have weight_scale_2 as well."""
        super().__init__(store)
        self._twice = twice

    def part(self, stem: str, suffix: str) -> StoredTensor:
        """Return a stored tensor, without the axes of 1 that scales of blocks may have.

        Raises:
            ModelError: the tensor is missing.
        """
        part = super().part(stem, suffix)
        if suffix == "weight_scale" and len(part.shape) == 4 and part.shape[1::2] == (1, 1):
            return replace(part, shape=part.shape[::2])
        return part

    def rebuild(self, name: str, stem: str) -> BuiltTensor:
        """Return the matrix with its stored codes, or converted if no kernel reads them."""
        dtype = self.leader(stem)[1]
        if dtype == FP8:
            if self.has(stem, "pre_quant_scale"):
                msg = f"{stem}pre_quant_scale of an FP8 matrix is not supported; {REMEDY}"
                raise ModelError(msg)
            if self.part(stem, "weight_scale").dtype in POWERS:
                return mx_matrix(self, name, stem, "weight", "fp8_e4m3")
            return fp8_matrix(self, name, stem, "weight_scale", BLOCK)
        if dtype == "I8":
            return self._int8(name, stem)
        scales = self.part(stem, "weight_scale").dtype
        if scales in POWERS:
            return self._mxfp4(name, stem)
        return self._nvfp4(name, stem) if scales == FP8 else self._int4(name, stem)

    def layout(self, stem: str) -> tuple[int, int, int]:
        """Return the number of outputs, of inputs, and of groups of inputs of an integer matrix."""
        rows, k = matrix_shape(self.part(stem, "weight"))
        scales = self.part(stem, "weight_scale").shape
        n = rows if self.leader(stem)[1] == "I8" else 2 * rows
        groups = scales[1] if len(scales) == 2 else 1
        twice = self._twice and self.leader(stem)[1] == "U8"
        second = self.has(stem, "weight_scale_2") and not twice
        if not scales or scales[0] != n or len(scales) > 2 or not groups or k % groups or second:
            raise self._refuse(stem, " and weight_scale_2" if second else "")
        return n, k, groups

    def _refuse(self, stem: str, more: str = "") -> ModelError:
        rows, width = matrix_shape(self.part(stem, "weight"))
        return ModelError(
            f"{stem}weight has {rows} x {width} bytes, which does not fit its weight_scale "
            f"{list(self.part(stem, 'weight_scale').shape)}{more}; {REMEDY}"
        )

    def _mxfp4(self, name: str, stem: str) -> BuiltTensor:
        """Return an MXFP4 matrix, with its codes in the order of GGUF blocks."""
        n, half = matrix_shape(self.part(stem, "weight"))
        groups = 2 * half // INT_GROUP
        fits = self.part(stem, "weight_scale").shape == (n, groups) and 2 * half % INT_GROUP == 0
        unread = [p for p in ("weight_scale_2", "pre_quant_scale") if self.has(stem, p)]
        if not fits or unread:
            raise self._refuse(stem, f" or {unread[0]}" if unread else "")
        return mxfp4_matrix(self, name, stem, "weight_scale")

    def packed(self, stem: str, rows: slice) -> Bytes:
        """Return the 4-bit codes as bytes [rows, k / 2]."""
        return join_bits(self._nibbles(stem, rows), 4)

    def _nibbles(self, stem: str, rows: slice) -> Bytes:
        """Return the 4-bit codes [rows, k], counted from 0."""
        n, k, _ = self.layout(stem)
        stored = self.part(stem, "weight").data.reshape(n // 2, k)
        wanted = np.arange(n)[rows]
        shift = (wanted % 2 * 4).astype(np.uint8)[:, None]
        return (stored[wanted // 2] >> shift & np.uint8(15)) ^ np.uint8(SYMMETRIC)

    def scale(self, stem: str, rows: slice) -> Float32:
        """The scales [rows, groups]."""
        _, _, groups = self.layout(stem)
        return some_floats(self.part(stem, "weight_scale"), rows).reshape(-1, groups)

    def zero(self, stem: str, rows: slice) -> Float32:
        """The zero points [rows, groups], for codes from 0."""
        n, _, groups = self.layout(stem)
        return np.full((n, groups), SYMMETRIC, np.float32)[rows]

    def _of_inputs(self, stem: str, k: int) -> Float32 | None:
        """Return the numbers [k] that multiply the inputs of a matrix; None if it has none."""
        if not self.has(stem, "pre_quant_scale"):
            return None
        found = floats(self.part(stem, "pre_quant_scale")).reshape(-1)
        if found.size != k:
            msg = f"{stem}pre_quant_scale has {found.size} numbers for {k} inputs; {REMEDY}"
            raise ModelError(msg)
        return found

    def _int4(self, name: str, stem: str) -> BuiltTensor:
        """Return a matrix of 4-bit codes, converted if its inputs have factors of their own."""
        n, k, groups = self.layout(stem)
        factors = self._of_inputs(stem, k)
        if factors is None and k // groups % INT_GROUP == 0:
            return self._few_bits(name, stem, 4, None)

        def values(rows: slice) -> Float32:
            scale = np.repeat(self.scale(stem, rows), k // groups, axis=1)
            found = (self._nibbles(stem, rows).astype(np.float32) - SYMMETRIC) * scale
            return found if factors is None else found * factors

        why = f"groups that are not equal multiples of {INT_GROUP} inputs"
        return self.converted(name, stem, (n, k), values, SCALED if factors is not None else why)

    def _int8(self, name: str, stem: str) -> BuiltTensor:
        """Return a matrix of int8, converted if its inputs have factors of their own."""
        n, k, groups = self.layout(stem)
        factors = self._of_inputs(stem, k)
        if groups != 1:
            msg = f"{stem}weight of int8 has {groups} groups of scales; {REMEDY}"
            raise ModelError(msg)

        def codes(rows: slice) -> npt.NDArray[np.int8]:
            return self.part(stem, "weight").data.view(np.int8).reshape(n, k)[rows]

        def values(rows: slice) -> Float32:
            found = codes(rows) * self.scale(stem, rows)
            return found if factors is None else found * factors

        if factors is not None:
            return self.converted(name, stem, (n, k), values, SCALED)

        def build(rows: slice) -> Bytes:
            return int8_rows(codes(rows), self.scale(stem, rows))

        return rebuilt(name, (n, k), "s8_channel", build, self.release(stem))

    def _nvfp4(self, name: str, stem: str) -> BuiltTensor:
        n, half = matrix_shape(self.part(stem, "weight"))
        scales, total = self.part(stem, "weight_scale"), self.part(stem, "weight_scale_2")
        groups = 2 * half // SMALL
        stored = scales.shape[1] if len(scales.shape) == 2 else 0
        fits = scales.shape == (n, stored) and stored and groups % stored == 0
        if not fits or 2 * half % SMALL or total.data.size != 4:
            msg = (
                f"{stem}weight has {n} x {half} bytes, but {stem}weight_scale is {scales.dtype} "
                f"{list(scales.shape)}; NVFP4 needs F8_E4M3 [{n}, {groups}], or fewer scales for "
                "more inputs each, and one weight_scale_2"
            )
            raise ModelError(msg)

        def pairs(rows: slice) -> Bytes:
            return self.part(stem, "weight").data.reshape(n, half)[rows]

        def small(rows: slice) -> Bytes:
            return np.repeat(scales.data.reshape(n, stored)[rows], groups // stored, axis=1)

        def build(rows: slice) -> Bytes:
            return nvfp4_rows(pairs(rows), small(rows), floats(total).reshape(1))

        def values(rows: slice) -> Float32:
            scale = e4m3(small(rows))[..., None] * floats(total).reshape(1)
            found = E2M1[spread_bits(pairs(rows), 4)].reshape(*scale.shape[:2], SMALL)
            whole = (found * scale).reshape(-1, 2 * half)
            return whole if factors is None else whole * factors

        factors = self._of_inputs(stem, 2 * half)
        if factors is not None:
            return self.converted(name, stem, (n, 2 * half), values, SCALED)
        if 2 * half % WHOLE:
            why = f"NVFP4 weights of a number of inputs that {WHOLE} does not divide"
            return self.converted(name, stem, (n, 2 * half), values, why)
        return rebuilt(name, (n, 2 * half), "nvfp4", build, self.release(stem))
