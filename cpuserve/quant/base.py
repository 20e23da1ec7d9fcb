"""The interface between weight formats and the C++ packers.

A format (dense, gguf, awq, gptq ...)
turns the tensors of a checkpoint into `QuantTensor`s: rows of a source type that the packers read
(`csrc/kernels/table/weights.h: SourceType`). Tensors stay quantized in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cpuserve.base.errors import ModelError
from cpuserve.program.weight_kinds import SourceType, WeightKind


@dataclass(frozen=True, slots=True)
class QuantTensor:
    """A tensor of a checkpoint, with its codes as they are stored.

    data: uint8 view [rows, row_bytes] of the mapped file (a vector has rows = 1).
    shape: the logical shape.
    row_order: row i is row row_order[i] of the file (None = the same order).
      row_order undoes the RoPE interleaving of q and k in GGUF files and keeps their blocks.
    column_order: weight i of a stored row multiplies input column_order[i] (None = input i).
      column_order is for inputs that share a scale but are not neighbours (act-order of GPTQ).
    release: a function that removes the pages of `data` from this process (MADV_DONTNEED).
    check: a function that raises SourceChanged if the file has changed since its first call.
    """

    name: str
    shape: tuple[int, ...]
    source: SourceType
    data: npt.NDArray[np.uint8]
    row_order: npt.NDArray[np.int32] | None = None
    release: Callable[[], None] | None = None
    column_order: npt.NDArray[np.int64] | None = None
    check: Callable[[], None] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of `data`."""
        return int(self.data.nbytes)

    def cut(self, rows: slice, row_bytes: int) -> npt.NDArray[np.uint8]:
        """Return rows [n, row_bytes] of `data`; rows are counted over all matrices of a stack."""
        data = self.data.reshape(-1, row_bytes)
        return data[rows if self.row_order is None else self.row_order[rows]]


# The number of weights that are built at a time, so that their codes and the new rows fit in L2.
WEIGHTS_AT_ONCE = 1 << 19
# Each range of rows that is built begins at a multiple of this number,
# so that a 32-bit word of codes does not have rows inside and outside of the range.
ROWS_TOGETHER = 32

Each = Callable[[Callable[[slice], None], Iterable[slice]], Iterable[None]]


class BuiltTensor(QuantTensor):
    """A tensor that builds its rows each time they are read, and does not keep them."""

    __slots__ = ("_build", "_size")
    _build: Callable[[slice], npt.NDArray[np.uint8]]
    _size: int

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        source: SourceType,
        size: int,
        build: Callable[[slice], npt.NDArray[np.uint8]],
        release: Callable[[], None] | None,
        column_order: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """size: the bytes of all rows.

        build: a function that returns the rows [n, row_bytes] of a slice.

        Rows are counted over all matrices of a stack.
        """
        fields = {"name": name, "shape": shape, "source": source, "row_order": None, "check": None}
        own = {"release": release, "column_order": column_order, "_build": build, "_size": size}
        for field, value in {**fields, **own}.items():
            object.__setattr__(self, field, value)  # a frozen dataclass refuses plain assignments

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """All rows, which are built again at every call."""
        return rows_of(self, map)

    @property
    def nbytes(self) -> int:
        """Size of `data` in bytes, without building it."""
        return self._size

    def cut(self, rows: slice, row_bytes: int) -> npt.NDArray[np.uint8]:
        """Return rows [n, row_bytes] of `data`, and build no other rows if the format allows it.

        Raises:
            ModelError: the stored tensors do not fit each other.
        """
        del row_bytes  # it follows from the shape
        try:
            return self._build(rows)
        except (ValueError, IndexError) as error:
            msg = f"the tensors that store {self.name} do not fit together: {error}"
            raise ModelError(msg) from error


def rows_of(tensor: QuantTensor, each: Each) -> npt.NDArray[np.uint8]:
    """Return `tensor.data`; if rows have to be built, they are built in parts that fit a cache.

    each: each(function, slices) returns the results, like `map` or the `map` of a thread pool.

    Raises:
        ModelError: the stored tensors do not fit each other.
    """
    if not isinstance(tensor, BuiltTensor):
        return tensor.data
    count, k = math.prod(tensor.shape[:-1]), tensor.shape[-1]
    some = WEIGHTS_AT_ONCE // max(k, 1) // ROWS_TOGETHER * ROWS_TOGETHER or ROWS_TOGETHER
    if len(tensor.shape) < 2 or count <= some:
        return tensor.cut(slice(None), 0)
    out = np.empty((count, tensor.nbytes // count), np.uint8)

    def build(rows: slice) -> None:
        out[rows] = tensor.cut(rows, out.shape[1])

    for _ in each(build, (slice(at, min(at + some, count)) for at in range(0, count, some))):
        pass
    return out


class Weights(Protocol):
    """All tensors of a checkpoint, each called as in a Program and in Hugging Face files."""

    def names(self) -> set[str]:
        """Return the name of each tensor in the checkpoint, after renaming."""

    def get(self, name: str) -> QuantTensor:
        """Return the tensor as a view of the mapped file; its data is not read yet."""

    def kind(self, name: str, dtype: str) -> WeightKind:
        """Return the weight kind that packing makes of this tensor for an engine in `dtype`."""
