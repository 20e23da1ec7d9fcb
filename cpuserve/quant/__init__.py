"""Weight formats: convert the tensors of a checkpoint to rows that the C++ packers read.

To add a format, write a file with a `@weight_format("name")` function and add a line to `BUILTIN`.
A checkpoint names its format in config.json as quantization_config.quant_method.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cpuserve.errors import ModelError
from cpuserve.registry import Registry

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from cpuserve.quant.base import QuantTensor, Weights
    from cpuserve.quant.stored import TensorStore

    WeightFormat = Callable[[TensorStore, dict[str, Any]], Weights]

BUILTIN = {
    "dense": "cpuserve.quant.dense:dense_weights",
    "gguf": "cpuserve.quant.gguf:gguf_weights",
    "awq": "cpuserve.quant.awq:awq_weights",
    "gptq": "cpuserve.quant.gptq:gptq_weights",
    "compressed-tensors": "cpuserve.quant.compressed_tensors:compressed_weights",
}
FORMATS: Registry[WeightFormat] = Registry("weight format", BUILTIN)
weight_format = FORMATS.register


def open_weights(name: str, store: TensorStore, config: dict[str, Any]) -> Weights:
    """The `Weights` of `store` in format `name`; ModelError for a format that does not exist."""
    found = FORMATS.get(name)
    if found is None:
        msg = (
            f"quantization {name!r} is not supported; supported: {', '.join(FORMATS.names())} "
            "(use the unquantized checkpoint, if needed with --quantization int8 or int4)"
        )
        raise ModelError(msg)
    return found(store, config)


def quantize_online(weights: Weights, scheme: str) -> Weights:
    """`weights`, with dense matrices quantized during packing unless `scheme` is "none"."""
    if scheme == "none":
        return weights
    from cpuserve.quant.online import OnlineWeights

    return OnlineWeights(weights, scheme)


def dequantize(tensor: QuantTensor) -> npt.NDArray[np.float32]:
    """An fp32 copy of the tensor, of `tensor.shape`, with row_order applied."""
    from cpuserve.quant import dense, gguf, rows

    if tensor.source in rows.SOURCES:
        return rows.dequantize(tensor)
    quantized = tensor.source.startswith("gguf_")
    return gguf.dequantize(tensor) if quantized else dense.dequantize(tensor)
