"""GGUF block formats: 32 weights share one fp16 scale (and one fp16 minimum in Q4_1).

Block layouts follow ggml's `block_q8_0`, `block_q4_0` and `block_q4_1` (ggml-common.h): a 4-bit
block keeps element i in the low nibble of byte i and element i + 16 in its high nibble.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cpuserve.quant import dense
from cpuserve.quant.base import QuantTensor, SourceType, Weights
from cpuserve.quant.registry import weight_format
from cpuserve.quant.stored import StoredWeights, TensorStore

SOURCES: dict[str, SourceType] = {
    **dense.SOURCES,
    "Q8_0": "gguf_q8_0",
    "Q4_0": "gguf_q4_0",
    "Q4_1": "gguf_q4_1",
}
BLOCK = 32
BLOCK_BYTES: dict[SourceType, int] = {"gguf_q8_0": 34, "gguf_q4_0": 18, "gguf_q4_1": 20}


@weight_format("gguf")
def gguf_weights(store: TensorStore, config: dict[str, Any]) -> Weights:  # noqa: ARG001
    """Weights of a GGUF file, which may mix quantized and dense tensors."""
    return StoredWeights(store, SOURCES)


def dequantize(tensor: QuantTensor) -> npt.NDArray[np.float32]:
    """An fp32 copy of the tensor, computed in fp32 exactly as ggml's dequantize_row_* does."""
    if tensor.source not in BLOCK_BYTES:
        return dense.dequantize(tensor)
    blocks = np.ascontiguousarray(tensor.data).reshape(-1, BLOCK_BYTES[tensor.source])
    scale = _f16_column(blocks, 0)
    if tensor.source == "gguf_q8_0":
        values = scale * blocks[:, 2:].view(np.int8).astype(np.float32)
    elif tensor.source == "gguf_q4_0":
        values = scale * (_nibbles(blocks[:, 2:]) - np.float32(8))
    else:
        values = scale * _nibbles(blocks[:, 4:]) + _f16_column(blocks, 2)
    return dense.in_row_order(values.reshape(tensor.shape), tensor)


def _f16_column(blocks: npt.NDArray[np.uint8], at: int) -> npt.NDArray[np.float32]:
    column = np.ascontiguousarray(blocks[:, at : at + 2])
    return column.view("<f2").astype(np.float32)


def _nibbles(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    both = np.concatenate([packed & 15, packed >> 4], axis=1)
    return both.astype(np.float32)
