"""Unquantized checkpoints: F32, F16 and BF16 tensors of safetensors and GGUF files."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from cpuserve.program.weight_kinds import SourceType
from cpuserve.quant.base import QuantTensor, Weights
from cpuserve.quant.registry import weight_format
from cpuserve.quant.stored import StoredWeights, TensorStore

T = TypeVar("T", bound=np.generic)
SOURCES: dict[str, SourceType] = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


@weight_format("dense")
def dense_weights(store: TensorStore, config: dict[str, Any]) -> Weights:  # noqa: ARG001
    """Return the weights of an unquantized checkpoint."""
    return StoredWeights(store, SOURCES)


def dequantize(tensor: QuantTensor) -> npt.NDArray[np.float32]:
    """Return an fp32 copy of an f32, f16 or bf16 tensor, of the shape `tensor.shape`."""
    flat = tensor.data.reshape(-1)
    if tensor.source == "bf16":
        # A bf16 value is the upper half of the same value in fp32.
        values = (flat.view("<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = flat.view("<f4" if tensor.source == "f32" else "<f2").astype(np.float32)
    return in_row_order(values.reshape(tensor.shape), tensor)


def in_row_order(values: npt.NDArray[T], tensor: QuantTensor) -> npt.NDArray[T]:
    """Return `values` [rows, ...] of the file, permuted by the tensor's row_order."""
    return values if tensor.row_order is None else values[tensor.row_order]
