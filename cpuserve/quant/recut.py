"""Weights with tensors that a file divides in another way than the Program does."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from cpuserve.base.errors import ModelError
from cpuserve.quant.base import BuiltTensor, QuantTensor
from cpuserve.quant.parts import part_of, transposed

if TYPE_CHECKING:
    import numpy.typing as npt

    from cpuserve.program.weight_kinds import WeightKind
    from cpuserve.quant.base import Weights

    Bytes = npt.NDArray[np.uint8]

_NAME = re.compile(r"(?P<stem>.+)\.(?P<kind>weight|bias)")


class JoinedWeights:
    """`Weights` where several tensors are one: the rows of the first, then of the next."""

    def __init__(self, weights: Weights, joined: Mapping[str, Sequence[str]]) -> None:
        """joined: the parts of each tensor, both by the end of their name (StoredNames)."""
        self._weights = weights
        self._parts: dict[str, list[str]] = {}
        stored = weights.names()
        wholes = {parts[0]: end for end, parts in joined.items()}
        for at, kind, end in _named(stored, wholes):
            whole = wholes[end]
            parts = [f"{at}{part}.{kind}" for part in joined[whole]]
            if stored.issuperset(parts):
                self._parts[f"{at}{whole}.{kind}"] = parts
        taken = {part for parts in self._parts.values() for part in parts}
        self._names = (stored - taken) | self._parts.keys()

    def names(self) -> set[str]:
        """Return the name of each tensor; parts are not listed."""
        return set(self._names)

    def get(self, name: str) -> QuantTensor:
        """Return the tensor; the rows of a joined one are copied when they are read.

        Raises:
            ModelError: its parts have other columns, or another quantization.
        """
        if name not in self._parts:
            return self._weights.get(name)
        parts = [self._weights.get(part) for part in self._parts[name]]
        first, *others = parts
        if any(not _fit(first, other) for other in others):
            msg = f"{', '.join(self._parts[name])} cannot be read as one tensor: their columns, "
            msg += "or the formats of their weights, differ"
            raise ModelError(msg)
        counts = [_rows(part) for part in parts]
        row_bytes = first.nbytes // counts[0]

        def build(rows: slice) -> Bytes:
            wanted, found, begin = np.arange(sum(counts))[rows], [], 0
            for part, count in zip(parts, counts, strict=True):
                own = wanted[(wanted >= begin) & (wanted < begin + count)] - begin
                found.append(_read(part, own, row_bytes))
                begin += count
            return np.concatenate(found)

        def release() -> None:
            for part in parts:
                if part.release is not None:
                    part.release()

        shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
        size = sum(counts) * row_bytes
        return BuiltTensor(name, shape, first.source, size, build, release, first.column_order)

    def kind(self, name: str, dtype: str) -> WeightKind:
        """Return the weight kind of the tensor; a joined one has the kind of its first part."""
        return self._weights.kind(self._parts.get(name, [name])[0], dtype)


class CutWeights:
    """`Weights` where the parts of a tensor are tensors of their own, or its transpose is read."""

    def __init__(
        self,
        weights: Weights,
        cut: Mapping[str, Mapping[str, int]],
        turned: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Wrap the weights of a checkpoint.

        cut: the parts of each tensor with their shares of the rows; turned: the transpose of each
        stored matrix; all by the end of their name (StoredNames).
        """
        self._weights = weights
        self._parts: dict[str, tuple[str, int, int, int]] = {}  # the whole, and shares of its rows
        stored = weights.names()
        matrices = [(at, end) for at, _, end in _named(stored, turned)]
        self._turned = {f"{at}{turned[end]}.weight": f"{at}{end}.weight" for at, end in matrices}
        wholes = set(self._turned.values())
        for at, kind, end in _named(stored, cut):
            wholes.add(whole := f"{at}{end}.{kind}")
            begin, total = 0, sum(cut[end].values())
            for part, share in cut[end].items():
                self._parts[f"{at}{part}.{kind}"] = whole, begin, begin + share, total
                begin += share
        self._names = (stored - wholes) | self._parts.keys() | self._turned.keys()

    def names(self) -> set[str]:
        """Return the name of each tensor; tensors that have parts are not listed."""
        return set(self._names)

    def get(self, name: str) -> QuantTensor:
        """Return the tensor; a part is a view if its rows are contiguous in the file."""
        if name not in self._parts:
            if name in self._turned:
                return transposed(self._weights.get(self._turned[name]))
            return self._weights.get(name)
        stored, begin, end, total = self._parts[name]
        whole = self._weights.get(stored)
        axis = int(len(whole.shape) == 3 and whole.shape[1] > 1)
        rows = whole.shape[axis]
        first, end = rows * begin // total, rows * end // total
        shape = (*whole.shape[:axis], end - first, *whole.shape[axis + 1 :])
        if not axis:
            part = part_of(name, whole, slice(first, end), vector=len(whole.shape) == 1)
            return part if part.shape == shape else _shaped(part, shape)
        row_bytes, each = whole.nbytes // _rows(whole), end - first

        def build(some: slice) -> Bytes:
            wanted = np.arange(whole.shape[0] * each)[some]
            return _read(whole, wanted // each * rows + wanted % each + first, row_bytes)

        size = whole.shape[0] * each * row_bytes
        return BuiltTensor(
            name, shape, whole.source, size, build, whole.release, whole.column_order
        )

    def kind(self, name: str, dtype: str) -> WeightKind:
        """Return the weight kind of the tensor; a part has the kind of the whole tensor."""
        whole = self._parts[name][0] if name in self._parts else self._turned.get(name, name)
        return self._weights.kind(whole, dtype)


def _named(names: Iterable[str], ends: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (the beginning, "weight" or "bias", the end) of each name with one of these ends."""
    for name in names:
        match = _NAME.fullmatch(name)
        for end in ends:
            if match is not None and match["stem"].endswith(end):
                yield match["stem"].removesuffix(end), match["kind"], end


def _rows(tensor: QuantTensor) -> int:
    """Return the number of rows of a tensor; a number of a vector is a row."""
    return math.prod(tensor.shape[:-1]) if len(tensor.shape) > 1 else tensor.shape[0]


def _fit(one: QuantTensor, other: QuantTensor) -> bool:
    """Whether the rows of two tensors have the same columns and the same form."""
    if one.shape[1:] != other.shape[1:] or one.source != other.source:
        return False
    if one.column_order is None or other.column_order is None:
        return one.column_order is other.column_order
    return np.array_equal(one.column_order, other.column_order)


def _read(tensor: QuantTensor, rows: npt.NDArray[np.int64], row_bytes: int) -> Bytes:
    """Return these rows [n, row_bytes] of a tensor, which are in ascending order."""
    if not len(rows):
        return np.empty((0, row_bytes), np.uint8)
    runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
    found = [tensor.cut(slice(int(run[0]), int(run[-1]) + 1), row_bytes) for run in runs]
    return np.concatenate([part.reshape(-1, row_bytes) for part in found])


def _shaped(part: QuantTensor, shape: tuple[int, ...]) -> QuantTensor:
    """Return a part of a tensor with more dimensions, in its shape."""
    if isinstance(part, BuiltTensor):
        build = partial(part.cut, row_bytes=0)
        return BuiltTensor(part.name, shape, part.source, part.nbytes, build, part.release)
    return replace(part, shape=shape)
