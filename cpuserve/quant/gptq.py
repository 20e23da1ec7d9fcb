"""GPTQ checkpoints: 4 bits, one scale and one zero point per group of inputs.

qweight int32 [k / 8, n] (eight inputs per word, lowest bits first), qzeros int32 [groups, n / 8],
scales fp16 [groups, n], g_idx int32 [k]; w = s (q - z). Checkpoint format "gptq" stores z - 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cpuserve.errors import ModelError
from cpuserve.quant.packed import PackedWeights, RebuiltTensor, expect, floats, unpack, words
from cpuserve.quant.registry import weight_format
from cpuserve.quant.rows import int4_rows

if TYPE_CHECKING:
    import numpy.typing as npt

    from cpuserve.quant.base import SourceType, Weights
    from cpuserve.quant.stored import TensorStore


@weight_format("gptq")
def gptq_weights(store: TensorStore, config: dict[str, Any]) -> Weights:
    """Weights of a GPTQ checkpoint; ModelError unless it has 4 bits."""
    settings = config.get("quantization_config") or {}
    expect(settings, "a GPTQ", bits=4)
    return GptqWeights(
        store, zero_offset=0 if settings.get("checkpoint_format") == "gptq_v2" else 1
    )


class GptqWeights(PackedWeights):
    """Weights whose matrices are stored as qweight, qzeros, scales and g_idx."""

    leader, leader_dtype = "qweight", "I32"
    parts = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, store: TensorStore, zero_offset: int) -> None:
        """zero_offset: added to the stored zero points."""
        super().__init__(store)
        self._zero_offset = zero_offset

    def source(self, stem: str) -> SourceType:
        """The source type of 4-bit codes with a scale and a minimum per group."""
        del stem
        return "u4m_g128"

    def rebuild(self, name: str, stem: str) -> RebuiltTensor:
        """The matrix with one row per output, from tensors with one column per output."""
        packed, n = self.part(stem, "qweight").shape

        def build() -> npt.NDArray[np.uint8]:
            self._check_order(stem, packed * 8)
            inputs = np.ascontiguousarray(words(self.part(stem, "qweight")).T)
            scale = floats(self.part(stem, "scales"))
            zero = unpack(words(self.part(stem, "qzeros"))).astype(np.float32) + self._zero_offset
            return int4_rows(inputs.view(np.uint8), scale.T, (-zero * scale).T, name)

        return RebuiltTensor(name, (n, packed * 8), "u4m_g128", build, self.release(stem))

    def _check_order(self, stem: str, k: int) -> None:
        """Raise ModelError unless the inputs of each group are consecutive."""
        if not self.has(stem, "g_idx"):
            return
        index = words(self.part(stem, "g_idx"))
        groups = self.part(stem, "scales").shape[0]
        if not np.array_equal(index, np.arange(k) // (k // groups)):
            msg = (
                f"{stem}g_idx: inputs in activation order (desc_act) are not supported; use a GPTQ "
                "checkpoint without it, or the unquantized one with --quantization int4"
            )
            raise ModelError(msg)
