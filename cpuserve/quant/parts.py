"""Weights of a checkpoint that can also be asked for rows of a tensor (program/parts.py)."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from cpuserve.errors import ModelError
from cpuserve.program.parts import Part, parse, rows
from cpuserve.quant.base import QuantTensor

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from cpuserve.quant.base import WeightKind, Weights


class PartTensor(QuantTensor):
    """Rows of a tensor. They are cut out when they are read, as a tensor may be built then."""

    __slots__ = ("_rows", "_whole")
    _whole: QuantTensor
    _rows: slice

    def __init__(self, name: str, whole: QuantTensor, rows: slice) -> None:
        """rows: of `whole`, whose matrices, if it is a stack, lie one after another."""
        count = len(range(rows.start, rows.stop, rows.step))
        fields = {
            "name": name,
            "shape": (count, *whole.shape[-1:]) if len(whole.shape) > 1 else (count,),
            "source": whole.source,
            "row_order": None,
            "release": whole.release,
        }
        for field, value in {**fields, "_whole": whole, "_rows": rows}.items():
            object.__setattr__(self, field, value)  # the base class is frozen

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """The rows [rows, row_bytes]."""
        order, data = self._whole.row_order, self._whole.data.reshape(-1, self._row_bytes)
        found = data[self._rows if order is None else order[self._rows]]
        # The elements of a vector are one row.
        return found if len(self.shape) > 1 else found.reshape(1, -1)

    @property
    def nbytes(self) -> int:
        """Bytes of these rows."""
        return self._row_bytes * self.shape[0]

    @property
    def _row_bytes(self) -> int:
        shape = self._whole.shape
        return self._whole.nbytes // math.prod(shape[:-1] if len(shape) > 1 else shape)


# A stack of the matrices of all experts, with or without the suffix of other matrices.
_STACK = re.compile(r"(?P<at>.*\.experts)\.(?P<part>\w+_proj|w[123])(?:\.weight)?")


class PartWeights:
    """`Weights` of a checkpoint in any format, and the parts of its tensors.

    If the checkpoint stores the matrices of all experts as one tensor (Qwen3.5), each of them has
    the name that it has in other checkpoints: `mlp.experts.3.up_proj.weight`.
    """

    def __init__(self, weights: Weights) -> None:
        """weights: of whole tensors."""
        self._weights = weights
        self._names = weights.names()
        self._experts: dict[str, str] = {}  # the part that each of these names stands for
        for name in list(self._names):
            match = _STACK.fullmatch(name)
            if match is None or len(shape := weights.get(name).shape) != 3:
                continue
            self._names.remove(name)
            self._experts |= _experts(name, match["at"], match["part"], shape)
        self._names |= self._experts.keys()

    def names(self) -> set[str]:
        """Every tensor name in the checkpoint, after renaming; parts are not listed."""
        return set(self._names)

    def get(self, name: str) -> QuantTensor:
        """The tensor, or the rows that `name` stands for.

        Raises:
            ModelError: the tensor does not have these rows.
        """
        part = parse(self._experts.get(name, name))
        if part is None:
            return self._weights.get(name)
        whole = self._weights.get(part.tensor)
        found = part.of(whole.shape)
        if found is None:
            raise ModelError(_lacks(part, whole.shape))
        return PartTensor(name, whole, found)

    def kind(self, name: str, dtype: str) -> WeightKind:
        """The kind of the tensor; all parts of one have it."""
        part = parse(self._experts.get(name, name))
        return self._weights.kind(name if part is None else part.tensor, dtype)


def _experts(name: str, at: str, part: str, shape: tuple[int, ...]) -> dict[str, str]:
    """The names of all experts' matrices in the stack `name` below `at`, and their rows there."""
    matrices = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
    each = shape[1] // len(matrices)
    return {
        f"{at}.{e}.{matrix}.weight": rows(name, i * each, each, index=e)
        for e in range(shape[0])
        for i, matrix in enumerate(matrices)
    }


def _lacks(part: Part, shape: tuple[int, ...]) -> str:
    at = "" if part.index is None else f" of matrix {part.index}"
    return (
        f"{part.tensor} has shape {list(shape)}, but the model reads rows up to "
        f"{part.end - 1}{at}; the checkpoint does not fit its config"
    )
