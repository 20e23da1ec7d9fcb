"""Weights of a checkpoint that can also be asked for rows of a tensor (program/parts.py)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cpuserve.errors import ModelError
from cpuserve.program.parts import Part, parse
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


class PartWeights:
    """`Weights` of a checkpoint in any format, and the parts of its tensors."""

    def __init__(self, weights: Weights) -> None:
        """weights: of whole tensors."""
        self._weights = weights

    def names(self) -> set[str]:
        """Every tensor name in the checkpoint, after renaming; parts are not listed."""
        return self._weights.names()

    def get(self, name: str) -> QuantTensor:
        """The tensor, or the rows that `name` stands for.

        Raises:
            ModelError: the tensor does not have these rows.
        """
        part = parse(name)
        if part is None:
            return self._weights.get(name)
        whole = self._weights.get(part.tensor)
        found = part.of(whole.shape)
        if found is None:
            raise ModelError(_lacks(part, whole.shape))
        return PartTensor(name, whole, found)

    def kind(self, name: str, dtype: str) -> WeightKind:
        """The kind of the tensor; all parts of one have it."""
        part = parse(name)
        return self._weights.kind(name if part is None else part.tensor, dtype)


def _lacks(part: Part, shape: tuple[int, ...]) -> str:
    at = "" if part.index is None else f" of matrix {part.index}"
    return (
        f"{part.tensor} has shape {list(shape)}, but the model reads rows up to "
        f"{part.end - 1}{at}; the checkpoint does not fit its config"
    )
