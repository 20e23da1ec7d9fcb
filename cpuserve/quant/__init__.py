"""Weight formats: convert the tensors of a checkpoint to rows that the C++ packers read.

To add a format, write a file with a `@weight_format("name")` function, and add a line to `BUILTIN`
in registry.py. A checkpoint states its format in config.json, in quantization_config.quant_method.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cpuserve.base.errors import ModelError
from cpuserve.quant.registry import FORMATS, weight_format

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from cpuserve.program.program import Program
    from cpuserve.quant.base import QuantTensor, Weights
    from cpuserve.quant.stored import TensorStore

__all__ = ["FORMATS", "dequantize", "open_weights", "quantize_online", "weight_format"]


def open_weights(name: str, store: TensorStore, config: dict[str, Any]) -> Weights:
    """Return the `Weights` of `store` in format `name`; ModelError if there is no such format."""
    found = FORMATS.get(name)
    if found is None:
        msg = (
            f"quantization {name!r} is not supported; supported: {', '.join(FORMATS.names())} "
            "(use the unquantized checkpoint, if needed with --quantization int8 or int4)"
        )
        raise ModelError(msg)
    from cpuserve.quant.parts import PartWeights

    return PartWeights(found(store, config))


def quantize_online(
    weights: Weights,
    program: Program,
    scheme: str,
    tower: tuple[str, ...] = (),
    tower_scheme: str = "none",
) -> Weights:
    """Return `weights`; packing quantizes its dense matrices with a scheme other than "none".

    program: the Program that reads them.
    tower: the beginnings of the tensor names of the tower, which has a scheme of its own,
      `tower_scheme`: "none" or "int8".
    """
    if scheme == tower_scheme == "none":
        return weights
    from cpuserve.quant.online import OnlineWeights

    return OnlineWeights(weights, program.weights, scheme, tower, tower_scheme)


def dequantize(tensor: QuantTensor) -> npt.NDArray[np.float32]:
    """Return an fp32 copy of the tensor, with row_order and column_order applied."""
    stored = _as_stored(tensor)
    if tensor.column_order is None:
        return stored
    values = stored.copy()
    values[..., tensor.column_order] = stored
    return values


def _as_stored(tensor: QuantTensor) -> npt.NDArray[np.float32]:
    """Return an fp32 copy of the tensor with row_order applied, but not column_order."""
    from cpuserve.quant import dense, float_rows, rows
    from cpuserve.quant.gguf import blocks

    if tensor.source in rows.SOURCES:
        return rows.dequantize(tensor)
    if tensor.source in float_rows.SOURCES:
        return float_rows.dequantize(tensor)
    quantized = tensor.source.startswith("gguf_")
    return blocks.dequantize(tensor) if quantized else dense.dequantize(tensor)
