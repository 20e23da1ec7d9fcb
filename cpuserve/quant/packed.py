"""Common code for checkpoints that store a quantized matrix as several tensors.

AWQ and GPTQ store `q_proj.qweight`, `q_proj.scales` and more.
Here these tensors become the single tensor that a Program reads (`q_proj.weight`).
Its rows are converted to a source type of the packers when they are read, one matrix at a time.

A matrix in a format without kernels becomes fp32 rows,
which are packed as int8 in groups of 32. With normally distributed weights,
this adds an error of 0.005 of their standard deviation; the error of FP8 itself is 0.026.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from cpuserve.base.errors import ModelError
from cpuserve.program.row_formats import CONVERTED_KIND
from cpuserve.quant.base import ROWS_TOGETHER, BuiltTensor, QuantTensor
from cpuserve.quant.codes import GROUP
from cpuserve.quant.dense import SOURCES, dequantize
from cpuserve.quant.float_rows import SOURCES as FLOAT_CODES
from cpuserve.quant.rows import (
    SMALL,
    SYMMETRIC,
    few_bits_source,
    int8_source,
    int_rows,
    join_bits,
    packed_row_bytes,
    row_bytes,
    spread_bits,
)
from cpuserve.quant.stored import (
    BY_HEADS,
    DENSE_KINDS,
    QUANTIZED_KINDS,
    StoredWeights,
    WithoutTensors,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from cpuserve.program.weight_kinds import SourceType, WeightKind
    from cpuserve.quant.stored import StoredTensor, TensorStore

    Bytes = npt.NDArray[np.uint8]
    Float32 = npt.NDArray[np.float32]
    Order = npt.NDArray[np.int64]

log = logging.getLogger(__name__)

MOST_ZERO = 255  # the largest zero point in 8-bit kinds; GPTQ can store 256
SIGN = 128  # the zero point of int8 numbers that are stored as uint8 codes
FOUR, EIGHT = 4, 8


def rebuilt(
    name: str,
    shape: tuple[int, ...],
    source: SourceType,
    build: Callable[[slice], Bytes],
    release: Callable[[], None],
    column_order: Order | None = None,
) -> BuiltTensor:
    """Return a matrix with rows [n, row_bytes] that `build` returns when they are read.

    The rows of a stack of matrices are counted over all of them.

    build(rows) is called with slices that begin and end at multiples of ROWS_TOGETHER,
    but the last slice ends at the end of the matrix.
    """
    n = math.prod(shape[:-1])
    size = n * row_bytes(source, shape[-1])

    def cut(rows: slice) -> Bytes:
        wanted = range(n)[rows]
        first = min(wanted) // ROWS_TOGETHER * ROWS_TOGETHER
        end = min(max(wanted) // ROWS_TOGETHER * ROWS_TOGETHER + ROWS_TOGETHER, n)
        built = build(slice(first, end))
        if built.shape != (end - first, size // n):
            msg = f"{end - first} rows of {size // n} bytes are {list(built.shape)}"
            raise ValueError(msg)
        if len(wanted) == end - first and wanted.step == 1:
            return built
        return built[np.arange(wanted.start, wanted.stop, wanted.step) - first]

    return BuiltTensor(name, shape, source, size, cut, release, column_order)


class PackedWeights(ABC):
    """`Weights` of a checkpoint that stores a matrix as several tensors with a common name stem."""

    leaders: tuple[tuple[str, str], ...]  # (suffix, dtype) of the tensors that mark such a matrix
    parts: tuple[str, ...]  # suffixes of all tensors that such a matrix may have

    def __init__(self, store: TensorStore) -> None:
        """Find the quantized matrices of `store`."""
        self._store = store
        self._rebuilt: dict[str, BuiltTensor] = {}
        self._said: set[str] = set()
        # By the stem of each quantized matrix: (suffix, dtype) of the tensor that marks it.
        self._stems = {
            name.removesuffix(suffix): (suffix, dtype)
            for name in store.names()
            for suffix, dtype in self.leaders
            if name.endswith(f".{suffix}") and store.dtype(name) == dtype
            if self.is_quantized(name.removesuffix(suffix))
        }
        taken = {stem + part for stem in self._stems for part in self.parts}
        self._dense = StoredWeights(WithoutTensors(store, taken), SOURCES)

    def names(self) -> set[str]:
        """Return all tensor names; the tensors of a quantized matrix count as one `.weight`."""
        return self._dense.names() | {stem + "weight" for stem in self._stems}

    def get(self, name: str) -> QuantTensor:
        """Return the tensor; rows of a quantized matrix are built when they are read."""
        stem = name.removesuffix("weight")
        if stem not in self._stems:
            return self._dense.get(name)
        if name not in self._rebuilt:
            self._rebuilt[name] = self.rebuild(name, stem)
        return self._rebuilt[name]

    def kind(self, name: str, dtype: str) -> WeightKind:
        """Return the weight kind: of the source type if it is quantized, otherwise of `dtype`."""
        if name.removesuffix("weight") not in self._stems:
            return self._dense.kind(name, dtype)
        source = self.get(name).source
        if name.endswith(BY_HEADS) and source in (*FLOAT_CODES, "f32"):
            return DENSE_KINDS[dtype]
        return QUANTIZED_KINDS.get(source, CONVERTED_KIND)

    def packed_bytes(self) -> int:
        """Return the bytes that all tensors take after packing."""
        total = 0
        for name in self.names():
            tensor = self.get(name)
            if name.removesuffix("weight") not in self._stems:
                total += tensor.nbytes
                continue
            source = tensor.source if tensor.source in QUANTIZED_KINDS else "gguf_q8_0"
            k = tensor.shape[-1]
            rows = tensor.nbytes // row_bytes(tensor.source, k)
            total += int(rows * packed_row_bytes(source, k))
        return total

    def is_quantized(self, stem: str) -> bool:  # noqa: ARG002
        """Whether tensors with the suffix and type of a leader are a matrix of this format."""
        return True

    def leader(self, stem: str) -> tuple[str, str]:
        """Return the (suffix, dtype) of the tensor that marks the matrix."""
        return self._stems[stem]

    @abstractmethod
    def rebuild(self, name: str, stem: str) -> BuiltTensor:
        """Return a quantized matrix; reading its `data` reads the codes from the files."""

    def converted(
        self,
        name: str,
        stem: str,
        shape: tuple[int, ...],
        values: Callable[[slice], Float32],
        why: str,
    ) -> BuiltTensor:
        """Return an fp32 matrix, for a format without kernels; packing converts it to int8.

        values: a function that returns some of its rows in fp32 (see `rebuilt`).
        why: the property that no kernel supports; it is logged once.
        """
        if why not in self._said:
            self._said.add(why)
            log.info("matrices with %s are converted to int8 in groups of 32 while loading", why)

        def build(rows: slice) -> Bytes:
            return np.ascontiguousarray(values(rows), np.float32).view(np.uint8)

        return rebuilt(name, shape, "f32", build, self.release(stem))

    def part(self, stem: str, suffix: str) -> StoredTensor:
        """Return a stored tensor of the matrix; ModelError if it is missing."""
        if not self.has(stem, suffix):
            msg = (
                f"the checkpoint has no tensor {stem}{suffix}, but other tensors of this matrix; "
                "download or convert the checkpoint again"
            )
            raise ModelError(msg)
        return self._store.get(stem + suffix)

    def has(self, stem: str, suffix: str) -> bool:
        """Whether the checkpoint has this tensor of the matrix."""
        return stem + suffix in self._store.names()

    def release(self, stem: str) -> Callable[[], None]:
        """Return a function that calls `release` of all stored tensors of the matrix."""
        parts = [self._store.get(stem + p) for p in self.parts if self.has(stem, p)]

        def run() -> None:
            for part in parts:
                if part.release:
                    part.release()

        return run


def group_order(tensor: StoredTensor, k: int, groups: int) -> Order | None:
    """Return the group of each input [k]; None if groups are equal runs of consecutive inputs.

    Raises:
        ModelError: a group does not exist.
    """
    order = words(tensor).astype(np.int64)
    if order.shape != (k,) or order.max(initial=0) >= groups:
        msg = f"{tensor.name} must have {k} numbers below {groups}, the number of its groups"
        raise ModelError(msg)
    return None if np.array_equal(order, np.arange(k) // (k // groups)) else order


def groups_of_columns(scales: StoredTensor, zeros: StoredTensor, n: int, packed: int) -> int:
    """Return the number of groups of a matrix that has a column for each of `n` outputs.

    packed: number of words with the zero points of a group for all outputs.

    Raises:
        ModelError: the scales or zero points do not have the shape for `n` outputs.
    """
    groups = scales.shape[0] if scales.shape else 0
    if scales.shape != (groups, n) or zeros.shape != (groups, packed):
        msg = (
            f"{scales.name} and {zeros.name} are {list(scales.shape)} and {list(zeros.shape)}, but "
            f"{n} outputs need [groups, {n}] and [groups, {packed}]; convert the checkpoint again"
        )
        raise ModelError(msg)
    return groups


def columns_by_group(order: Order, groups: int) -> Order | None:
    """Return the inputs sorted by group; None unless groups have equal multiples of 32 inputs.

    order: the group of each input [k].
    """
    each = len(order) // groups
    equal = bool((np.bincount(order, minlength=groups) == each).all())
    return np.argsort(order, kind="stable") if equal and each % SMALL == 0 else None


def words(tensor: StoredTensor) -> npt.NDArray[np.uint32]:
    """Return a stored int32 tensor as unsigned words, in its shape.

    Raises:
        ModelError: the tensor has another type.
    """
    if tensor.dtype != "I32":
        msg = f"{tensor.name} has type {tensor.dtype}; only codes packed in int32 are supported"
        raise ModelError(msg)
    return tensor.data.view("<u4").reshape(tensor.shape)


def floats(tensor: StoredTensor) -> Float32:
    """Return a stored float tensor in fp32.

    Raises:
        ModelError: the tensor does not have a float type.
    """
    return _in_fp32(tensor, tensor.data.reshape(1, -1), tensor.shape)


def some_floats(tensor: StoredTensor, rows: slice | Order) -> Float32:
    """Return the elements or rows `rows` of a float tensor in fp32; ModelError as for `floats`."""
    data = tensor.data.reshape(*tensor.shape[:2], -1)[rows]
    shape = (len(data), *tensor.shape[1:])
    return _in_fp32(tensor, np.ascontiguousarray(data).reshape(1, -1), shape)


def column_floats(tensor: StoredTensor, columns: slice) -> Float32:
    """Return a part of the second dimension of a float tensor in fp32; ModelError as `floats`."""
    data = tensor.data.reshape(*tensor.shape, -1)[:, columns]
    return _in_fp32(tensor, np.ascontiguousarray(data).reshape(1, -1), data.shape[:-1])


def _in_fp32(tensor: StoredTensor, data: Bytes, shape: tuple[int, ...]) -> Float32:
    if tensor.dtype == "F8_E8M0":  # the exponent of 2, as in OCP's MX formats
        return np.ldexp(np.float32(1), data.astype(np.int32) - 127).reshape(shape)
    if tensor.dtype not in SOURCES:
        msg = f"{tensor.name} has type {tensor.dtype}; only float types are supported"
        raise ModelError(msg)
    return dequantize(QuantTensor(tensor.name, shape, SOURCES[tensor.dtype], data))


def unpack(packed: npt.NDArray[np.uint32], bits: int = 4) -> Bytes:
    """Return codes of `bits` bits [..., 32 / bits * w] from words [..., w], lowest bits first.

    A code of 3 bits may begin in one word and end in the next word.
    """
    return spread_bits(np.ascontiguousarray(packed).view(np.uint8), bits)


class IntWeights(PackedWeights):
    """Weights with integer codes, and a scale and a zero point for each group."""

    @abstractmethod
    def layout(self, stem: str) -> tuple[int, int, int]:
        """Return the number of outputs, of inputs, and of groups of inputs of a matrix."""

    # The methods below read only the passed rows, which are slices as `rebuilt` describes them.

    @abstractmethod
    def packed(self, stem: str, rows: slice) -> Bytes:
        """Return the codes [rows, k * bits / 8] (fewer than 8 bits each), lowest bits first."""

    @abstractmethod
    def scale(self, stem: str, rows: slice) -> Float32:
        """The scales [rows, groups]."""

    @abstractmethod
    def zero(self, stem: str, rows: slice) -> Float32:
        """The zero points [rows, groups]."""

    def _all_zeros_are(self, stem: str, number: int) -> bool:
        """Whether all zero points of the matrix are equal to `number`."""
        n, _, _ = self.layout(stem)
        return bool((self.zero(stem, slice(0, n)) == number).all())

    def rebuild(self, name: str, stem: str) -> BuiltTensor:
        """Return the matrix of 4-bit codes, in blocks of a size that divides its groups."""
        return self._few_bits(name, stem, FOUR, None)

    def _few_bits(self, name: str, stem: str, bits: int, columns: Order | None) -> BuiltTensor:
        """Return the matrix of 2- to 4-bit codes.

        columns: the inputs sorted by group; None if they are stored in this order.
        """
        n, k, groups = self.layout(stem)
        small = bits == FOUR and groups > 0 and k // groups % GROUP != 0
        symmetric = small and self._all_zeros_are(stem, SYMMETRIC)
        source = few_bits_source(k, groups, bits, symmetric=symmetric, name=name)

        def build(rows: slice) -> Bytes:
            packed = self.packed(stem, rows)
            if columns is not None:
                packed = join_bits(np.take(spread_bits(packed, bits), columns, axis=1), bits)
            return int_rows(packed, self.scale(stem, rows), self.zero(stem, rows), source)

        return rebuilt(name, (n, k), source, build, self.release(stem), columns)

    def from_codes(
        self,
        name: str,
        stem: str,
        codes: Callable[[slice], Bytes],
        order: Order | None,
        bits: int,
    ) -> BuiltTensor:
        """Return the matrix with these codes [n, k].

        A matrix keeps its codes if a kernel can read its groups,
        which have a multiple of 32 inputs. Otherwise its weights are converted to floats.

        codes: a function that returns the codes of some rows (see `rebuilt`).
        order: the group of each input [k]; None if each group has consecutive inputs.

        Raises:
            ModelError: the groups do not have equal sizes, and `order` is None.
        """
        n, k, groups = self.layout(stem)
        columns = None if order is None else columns_by_group(order, groups)
        if bits < EIGHT and (order is None or columns is not None):
            return self._few_bits(name, stem, bits, columns)
        each = k // groups if groups and k % groups == 0 else 0
        zero = self.zero(stem, slice(0, n))
        whole = columns is not None or (order is None and each > 0 and each % SMALL == 0)
        if whole and zero.max(initial=0) <= MOST_ZERO:
            source = int8_source(each, symmetric=bool((zero == SIGN).all()))

            def build(rows: slice) -> Bytes:
                found = codes(rows)
                if columns is not None:
                    found = np.take(found, columns, axis=1)
                return int_rows(found, self.scale(stem, rows), self.zero(stem, rows), source)

            release = self.release(stem)
            return rebuilt(name, (n, k), source, build, release, columns)
        if order is None and not each:
            msg = f"{name}: {k} inputs cannot form {groups} groups of one size"
            raise ModelError(msg)
        of_input = np.arange(k) // each if order is None else order

        def values(rows: slice) -> Float32:
            scale, zero = self.scale(stem, rows), self.zero(stem, rows)
            found = codes(rows).astype(np.float32) - zero[:, of_input]
            return found * scale[:, of_input]

        why = f"groups that are not equal multiples of {SMALL} inputs"
        if whole:
            why = f"zero points above {MOST_ZERO}"
        return self.converted(name, stem, (n, k), values, why)


def shown(setting: Any, most: int = 40) -> str:
    """Return a setting for a message of one line, cut after `most` characters."""
    text = str(setting)
    return (text if text.isprintable() else repr(text))[:most]


def expect(config: dict[str, Any], method: str, **wanted: Any) -> None:
    """Raise a ModelError that lists each setting of quantization_config that is not as wanted."""
    bad = {k: config.get(k) for k, v in wanted.items() if config.get(k, v) != v}
    if bad:
        got = ", ".join(f"{k} = {shown(v)}" for k, v in bad.items())
        need = ", ".join(f"{k} = {wanted[k]}" for k in bad)
        msg = (
            f"{method} checkpoint with {got} is not supported, only {need}; "
            "use the unquantized checkpoint with --quantization int4 or int8"
        )
        raise ModelError(msg)
