"""TensorRT Model Optimizer (modelopt, NVIDIA's checkpoints): FP8 and NVFP4.

fp8    weight F8_E4M3 [n, k] with weight_scale: one number, or one for each row
nvfp4  weight uint8 [n, k / 2] of E2M1, the first code in the low half; weight_scale F8_E4M3
       [n, k / 16], and weight_scale_2, one number; a scale is weight_scale * weight_scale_2

The scales of activations, keys and values are not used. The tensors of a matrix show how it is
stored, so a checkpoint may mix these. Older directories have the settings in hf_quant_config.json.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cpuserve.errors import ModelError
from cpuserve.quant.float_rows import SMALL, WHOLE, e4m3, nvfp4_rows
from cpuserve.quant.fp8 import FP8, fp8_matrix, matrix_shape
from cpuserve.quant.packed import PackedWeights, floats, rebuilt
from cpuserve.quant.registry import weight_format
from cpuserve.quant.rows import E2M1, spread_bits

if TYPE_CHECKING:
    import numpy.typing as npt

    from cpuserve.quant.base import BuiltTensor, Weights
    from cpuserve.quant.stored import TensorStore

    Bytes = npt.NDArray[np.uint8]
    Float32 = npt.NDArray[np.float32]

ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")


@weight_format("modelopt")
def modelopt_weights(store: TensorStore, config: dict[str, Any]) -> Weights:
    """Return the weights of a modelopt checkpoint; ModelError for another algorithm."""
    settings = config.get("quantization_config") or {}
    found = settings.get("quant_algo")
    if found is not None and found not in ALGORITHMS:
        msg = (
            f"modelopt checkpoint with quant_algo {found!s:.40} is not supported, only "
            f"{', '.join(ALGORITHMS)}; use the unquantized checkpoint with --quantization int4 or "
            "int8"
        )
        raise ModelError(msg)
    return ModeloptWeights(store)


class ModeloptWeights(PackedWeights):
    """Weights with matrices in the two formats above."""

    leaders = (("weight", FP8), ("weight", "U8"))
    parts = (
        "weight",
        "weight_scale",
        "weight_scale_2",
        "input_scale",
        "pre_quant_scale",
        "k_scale",
        "v_scale",
    )

    def rebuild(self, name: str, stem: str) -> BuiltTensor:
        """Return the matrix with its stored codes, or converted if no kernel reads them."""
        if self.has(stem, "pre_quant_scale"):
            msg = (
                f"{stem}pre_quant_scale: scaled activations of AWQ are not supported in modelopt "
                "checkpoints; use the unquantized checkpoint with --quantization int4 or int8"
            )
            raise ModelError(msg)
        if self.leader(stem)[1] == FP8:
            return fp8_matrix(self, name, stem, "weight_scale", None)
        return self._nvfp4(name, stem)

    def _nvfp4(self, name: str, stem: str) -> BuiltTensor:
        n, half = matrix_shape(self.part(stem, "weight"))
        scales, total = self.part(stem, "weight_scale"), self.part(stem, "weight_scale_2")
        groups = 2 * half // SMALL
        if scales.dtype != FP8 or scales.shape != (n, groups) or total.data.size != 4:
            msg = (
                f"{stem}weight has {n} x {half} bytes, but {stem}weight_scale is {scales.dtype} "
                f"{list(scales.shape)}; NVFP4 needs F8_E4M3 [{n}, {groups}], and one weight_scale_2"
            )
            raise ModelError(msg)

        def pairs(rows: slice) -> Bytes:
            return self.part(stem, "weight").data.reshape(n, half)[rows]

        def small(rows: slice) -> Bytes:
            return scales.data.reshape(n, groups)[rows]

        def build(rows: slice) -> Bytes:
            return nvfp4_rows(pairs(rows), small(rows), floats(total).reshape(1))

        def values(rows: slice) -> Float32:
            scale = e4m3(small(rows))[..., None] * floats(total).reshape(1)
            found = E2M1[spread_bits(pairs(rows), 4)].reshape(*scale.shape[:2], SMALL)
            return (found * scale).reshape(-1, 2 * half)

        if 2 * half % WHOLE:
            why = f"NVFP4 weights of a number of inputs that {WHOLE} does not divide"
            return self.converted(name, stem, (n, 2 * half), values, why)
        return rebuilt(name, (n, 2 * half), "nvfp4", build, self.release(stem))
