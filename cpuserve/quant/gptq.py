"""GPTQ and AutoRound: 2, 3, 4 or 8 bits, with a scale and a zero point per group of inputs.

A matrix of n outputs and k inputs is stored as qweight int32 [k * bits / 32, n]
(codes of consecutive inputs, lowest bits first), qzeros int32 [groups, n * bits / 32],
scales fp16 [groups, n] and g_idx int32 [k], the group of each input; w = scale * (q - zero).
In the checkpoint format "gptq", qzeros has zero - 1 instead of zero.

AutoRound (Intel) packs matrices as GPTQ or as AWQ. Its packing_format says how:
"auto_round:auto_gptq" as GPTQ, "auto_round:gptqmodel" and "auto_round" as GPTQ with plain
zero points, "auto_round:auto_awq" as AWQ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from cpuserve.errors import ModelError
from cpuserve.quant.awq import AwqWeights
from cpuserve.quant.packed import (
    IntWeights,
    column_floats,
    expect,
    group_order,
    groups_of_columns,
    unpack,
    words,
)
from cpuserve.quant.registry import weight_format
from cpuserve.quant.rows import spread_bits

if TYPE_CHECKING:
    import numpy.typing as npt

    from cpuserve.quant.base import BuiltTensor, Weights
    from cpuserve.quant.stored import TensorStore

    Bytes = npt.NDArray[np.uint8]
    Float32 = npt.NDArray[np.float32]

BITS = (2, 3, 4, 8)
WHOLE = 16  # bits of matrices that AutoRound has not quantized


@weight_format("gptq")
def gptq_weights(store: TensorStore, config: dict[str, Any]) -> Weights:
    """Return the weights of a GPTQ checkpoint; ModelError for an unsupported number of bits."""
    settings = config.get("quantization_config") or {}
    bits = settings.get("bits", 4)
    if bits not in BITS:
        expect(settings, "a GPTQ", bits="2, 3, 4 or 8")
    if settings.get("is_marlin_format"):
        expect(settings, "a GPTQ", is_marlin_format=False)
    if (layout := settings.get("checkpoint_format")) not in (None, "gptq", "gptq_v2"):
        expect({"checkpoint_format": layout}, "a GPTQ", checkpoint_format="gptq or gptq_v2")
    offset = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1
    return GptqWeights(store, bits=bits, zero_offset=offset)


class GptqWeights(IntWeights):
    """Weights with matrices stored as qweight, qzeros, scales and g_idx."""

    leaders = (("qweight", "I32"),)
    parts = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, store: TensorStore, *, bits: int, zero_offset: int) -> None:
        """zero_offset: a number to add to the stored zero points."""
        super().__init__(store)
        self._bits = bits
        self._zero_offset = zero_offset

    def layout(self, stem: str) -> tuple[int, int, int]:
        """Return the number of outputs, of inputs, and of groups of inputs of a matrix."""
        packed, n = self.part(stem, "qweight").shape
        scales, zeros = self.part(stem, "scales"), self.part(stem, "qzeros")
        groups = groups_of_columns(scales, zeros, n, -(-n * self._bits // 32))
        return n, packed * 32 // self._bits, groups

    def packed(self, stem: str, rows: slice) -> Bytes:
        """Return the codes as bytes [rows, k * bits / 8]; the file has a column for each output."""
        return np.ascontiguousarray(words(self.part(stem, "qweight"))[:, rows].T).view(np.uint8)

    def scale(self, stem: str, rows: slice) -> Float32:
        """The scales [rows, groups]."""
        return column_floats(self.part(stem, "scales"), rows).T

    def zero(self, stem: str, rows: slice) -> Float32:
        """The zero points [rows, groups]."""
        columns = slice(rows.start * self._bits // 32, -(-rows.stop * self._bits // 32))
        stored = unpack(words(self.part(stem, "qzeros"))[:, columns], self._bits)
        stored = stored[:, : rows.stop - rows.start].T
        return stored.astype(np.float32) + np.float32(self._zero_offset)

    def rebuild(self, name: str, stem: str) -> BuiltTensor:
        """Return the matrix; inputs are sorted by group unless groups have consecutive inputs."""
        order = None
        if self.has(stem, "g_idx"):
            _, k, groups = self.layout(stem)
            order = group_order(self.part(stem, "g_idx"), k, groups)

        def codes(rows: slice) -> Bytes:
            return spread_bits(self.packed(stem, rows), self._bits)

        return self.from_codes(name, stem, codes, order, self._bits)


@weight_format("auto-round")
def auto_round_weights(store: TensorStore, config: dict[str, Any]) -> Weights:
    """Return the weights of an AutoRound checkpoint; ModelError for another packing or type."""
    settings = config.get("quantization_config") or {}
    expect(settings, "an AutoRound", data_type="int")
    bits = settings.get("bits", 4)
    if bits not in BITS:
        expect(settings, "an AutoRound", bits="2, 3, 4 or 8")
    own = settings.get("extra_config") or {}
    others = {
        name: each.get("bits")
        for name, each in (own.items() if isinstance(own, Mapping) else ())
        if isinstance(each, Mapping) and each.get("bits", bits) not in (bits, WHOLE)
    }
    if others:
        name, other = next(iter(others.items()))
        msg = (
            f"AutoRound checkpoint with {bits} bits and {other!s:.20} bits in {name!s:.60} is not "
            "supported; use the unquantized checkpoint with --quantization int4 or int8"
        )
        raise ModelError(msg)
    packing = settings.get("packing_format", "auto_round:auto_gptq")
    if packing in ("auto_round", "auto_round:gptqmodel"):
        return GptqWeights(store, bits=bits, zero_offset=0)
    if packing == "auto_round:auto_gptq":
        return GptqWeights(store, bits=bits, zero_offset=1)
    expect({"packing_format": packing}, "an AutoRound", packing_format="auto_round:auto_awq")
    expect(settings, "an AutoRound", bits=4)
    return AwqWeights(store)
