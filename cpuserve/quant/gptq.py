"""GPTQ and AutoRound: 2, 3, 4 or 8 bits, with a scale and a zero point per group of inputs.

A matrix of n outputs and k inputs is stored as qweight int32 [k * bits / 32, n]
(codes of consecutive inputs, lowest bits first), qzeros int32 [groups, n * bits / 32],
scales fp16 [groups, n] and g_idx int32 [k], the group of each input; w = scale * (q - zero).
In the checkpoint format "gptq", qzeros has zero - 1 instead of zero. GPTQModel calls the setting
"format" as well as "checkpoint_format", and "format" decides, as in that library.

By rules of GPTQModel ("dynamic") and of AutoRound ("extra_config"), some matrices have another
number of bits, or none. Patterns there fit the tensors of the original code, so the shapes of the
tensors decide which of these numbers a matrix has, and a dense matrix needs no rule.

AutoRound (Intel) packs matrices as GPTQ or as AWQ. Its packing_format says how:
"auto_round:auto_gptq" as GPTQ, "auto_round:gptqmodel" and "auto_round" as GPTQ with plain
zero points, "auto_round:auto_awq" as AWQ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from cpuserve.quant.awq import AwqWeights
from cpuserve.quant.packed import (
    IntWeights,
    column_floats,
    expect,
    group_order,
    groups_of_columns,
    shown,
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


@weight_format("gptq")
def gptq_weights(store: TensorStore, config: dict[str, Any]) -> Weights:
    """Return the weights of a GPTQ checkpoint; ModelError for an unsupported number of bits."""
    settings = config.get("quantization_config") or {}
    bits = settings.get("bits", 4)
    if type(bits) is not int or bits not in BITS:
        expect(settings, "a GPTQ", bits="2, 3, 4 or 8")
    if settings.get("is_marlin_format"):
        expect(settings, "a GPTQ", is_marlin_format=False)
    key = "checkpoint_format" if settings.get("format") is None else "format"
    if (layout := settings.get(key)) not in (None, "gptq", "gptq_v2"):
        expect({key: layout}, "a GPTQ", **{key: "gptq or gptq_v2"})
    others = _other_bits(settings.get("dynamic"), bits, "a GPTQ")
    return GptqWeights(store, bits=(bits, *others), zero_offset=0 if layout == "gptq_v2" else 1)


def _other_bits(rules: Any, bits: int, method: str) -> list[int]:
    """Return the further numbers of bits in rules {matrices: settings}; ModelError for others.

    Matrices with null or more than 8 bits are not quantized, as in AutoRound.
    """
    found: list[int] = []
    for name, each in rules.items() if isinstance(rules, Mapping) else ():
        number = each.get("bits", bits) if isinstance(each, Mapping) else bits
        dense = number is None or (type(number) is int and number > max(BITS))
        if str(name).startswith("-:") or dense or number == bits:
            continue
        if type(number) is not int or number not in BITS:
            expect(
                {f"bits in {shown(name, 60)}": number},
                method,
                **{f"bits in {shown(name, 60)}": "2, 3, 4 or 8"},
            )
        found.append(number)
    return sorted(set(found))


class GptqWeights(IntWeights):
    """Weights with matrices stored as qweight, qzeros, scales and g_idx."""

    leaders = (("qweight", "I32"),)
    parts = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, store: TensorStore, *, bits: Iterable[int], zero_offset: int) -> None:
        """Wrap a store.

        bits: the numbers of bits that a matrix may have, the usual one first.
        zero_offset: a number to add to the stored zero points.
        """
        super().__init__(store)
        self._given = tuple(bits)
        self._zero_offset = zero_offset

    def _bits(self, stem: str) -> int:
        """Return the bits of a code, by the words of the zero points; the usual if none fits."""
        n, zeros = self.part(stem, "qweight").shape[-1], self.part(stem, "qzeros").shape[-1]
        return next((b for b in self._given if zeros == -(-n * b // 32)), self._given[0])

    def layout(self, stem: str) -> tuple[int, int, int]:
        """Return the number of outputs, of inputs, and of groups of inputs of a matrix."""
        packed, n = self.part(stem, "qweight").shape
        scales, zeros = self.part(stem, "scales"), self.part(stem, "qzeros")
        bits = self._bits(stem)
        groups = groups_of_columns(scales, zeros, n, -(-n * bits // 32))
        return n, packed * 32 // bits, groups

    def packed(self, stem: str, rows: slice) -> Bytes:
        """Return the codes as bytes [rows, k * bits / 8]; the file has a column for each output."""
        return np.ascontiguousarray(words(self.part(stem, "qweight"))[:, rows].T).view(np.uint8)

    def scale(self, stem: str, rows: slice) -> Float32:
        """The scales [rows, groups]."""
        return column_floats(self.part(stem, "scales"), rows).T

    def zero(self, stem: str, rows: slice) -> Float32:
        """The zero points [rows, groups]."""
        bits = self._bits(stem)
        columns = slice(rows.start * bits // 32, -(-rows.stop * bits // 32))
        stored = unpack(words(self.part(stem, "qzeros"))[:, columns], bits)
        stored = stored[:, : rows.stop - rows.start].T
        return stored.astype(np.float32) + np.float32(self._zero_offset)

    def rebuild(self, name: str, stem: str) -> BuiltTensor:
        """Return the matrix; inputs are sorted by group unless groups have consecutive inputs."""
        order = None
        if self.has(stem, "g_idx"):
            _, k, groups = self.layout(stem)
            order = group_order(self.part(stem, "g_idx"), k, groups)

        bits = self._bits(stem)

        def codes(rows: slice) -> Bytes:
            return spread_bits(self.packed(stem, rows), bits)

        return self.from_codes(name, stem, codes, order, bits)


@weight_format("auto-round")
def auto_round_weights(store: TensorStore, config: dict[str, Any]) -> Weights:
    """Return the weights of an AutoRound checkpoint; ModelError for another packing or type."""
    settings = config.get("quantization_config") or {}
    expect(settings, "an AutoRound", data_type="int")
    bits = settings.get("bits", 4)
    if type(bits) is not int or bits not in BITS:
        expect(settings, "an AutoRound", bits="2, 3, 4 or 8")
    others = _other_bits(settings.get("extra_config"), bits, "an AutoRound")
    packing = settings.get("packing_format", "auto_round:auto_gptq")
    if packing in ("auto_round", "auto_round:gptqmodel", "auto_round:auto_gptq"):
        offset = 1 if packing == "auto_round:auto_gptq" else 0
        return GptqWeights(store, bits=(bits, *others), zero_offset=offset)
    expect({"packing_format": packing}, "an AutoRound", packing_format="auto_round:auto_awq")
    expect(settings, "an AutoRound", bits=4)
    expect({"bits": [bits, *others]}, "an AutoRound", bits=[4])
    return AwqWeights(store)
