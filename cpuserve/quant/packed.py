"""Common code for AWQ, GPTQ and compressed-tensors checkpoints.

These store a quantized matrix as several tensors (`q_proj.qweight`, `q_proj.scales` ...). Here they
become the single tensor that a Program reads (`q_proj.weight`). Its rows are converted to a source
type of the packers when they are read, one matrix at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from cpuserve.errors import ModelError
from cpuserve.quant.base import QuantTensor
from cpuserve.quant.codes import GROUP
from cpuserve.quant.dense import SOURCES, dequantize
from cpuserve.quant.rows import BLOCK_BYTES
from cpuserve.quant.stored import QUANTIZED_KINDS, StoredWeights

if TYPE_CHECKING:
    import numpy.typing as npt

    from cpuserve.quant.base import SourceType, WeightKind
    from cpuserve.quant.stored import StoredTensor, TensorStore

    Bytes = npt.NDArray[np.uint8]
    Float32 = npt.NDArray[np.float32]

PER_WORD = 8  # 4-bit codes in an int32


class RebuiltTensor(QuantTensor):
    """A `QuantTensor` that builds its rows each time `data` is read, and does not keep them."""

    __slots__ = ("_build", "_nbytes")
    _build: Callable[[], Bytes]
    _nbytes: int

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        source: SourceType,
        build: Callable[[], Bytes],
        release: Callable[[], None],
    ) -> None:
        """build: returns the rows [n, row_bytes]."""
        n, k = shape
        row_bytes = k + 4 if source == "s8_channel" else k // GROUP * BLOCK_BYTES
        fields = {"name": name, "shape": shape, "source": source, "row_order": None}
        own = {"release": release, "_build": build, "_nbytes": n * row_bytes}
        for field, value in {**fields, **own}.items():
            object.__setattr__(self, field, value)  # the base class is frozen

    @property
    def data(self) -> Bytes:
        """The rows [n, row_bytes], built again at every call."""
        return self._build()

    @property
    def nbytes(self) -> int:
        """Size of `data` in bytes, without building it."""
        return self._nbytes


class PackedWeights(ABC):
    """`Weights` of a checkpoint that stores a matrix as several tensors with a common name stem."""

    leader: str  # a stem with a tensor of this suffix is a quantized matrix
    parts: tuple[str, ...]  # suffixes of all tensors a quantized matrix may have
    leader_dtype: str

    def __init__(self, store: TensorStore) -> None:
        """Find the quantized matrices of `store`."""
        self._store = store
        names = store.names()
        self._stems = {
            name.removesuffix(self.leader)
            for name in names
            if name.endswith(self.leader) and store.dtype(name) == self.leader_dtype
        }
        taken = {stem + part for stem in self._stems for part in self.parts}
        self._dense = StoredWeights(_Without(store, taken), SOURCES)

    def names(self) -> set[str]:
        """All tensor names; the tensors of a quantized matrix appear as one `.weight`."""
        return self._dense.names() | {stem + "weight" for stem in self._stems}

    def get(self, name: str) -> QuantTensor:
        """The tensor; rows of a quantized matrix are built when they are read."""
        stem = name.removesuffix("weight")
        if stem not in self._stems:
            return self._dense.get(name)
        return self.rebuild(name, stem)

    def kind(self, name: str, dtype: str) -> WeightKind:
        """The kind of a quantized tensor follows its source; dense ones follow `dtype`."""
        stem = name.removesuffix("weight")
        if stem not in self._stems:
            return self._dense.kind(name, dtype)
        return QUANTIZED_KINDS[self.source(stem)]

    @abstractmethod
    def source(self, stem: str) -> SourceType:
        """The row format of a quantized matrix."""

    @abstractmethod
    def rebuild(self, name: str, stem: str) -> RebuiltTensor:
        """The tensor of a quantized matrix."""

    def part(self, stem: str, suffix: str) -> StoredTensor:
        """A stored tensor of the matrix; ModelError if it is missing."""
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
        """A function that calls `release` of all stored tensors of the matrix."""
        parts = [self._store.get(stem + p) for p in self.parts if self.has(stem, p)]

        def run() -> None:
            for part in parts:
                if part.release:
                    part.release()

        return run


class _Without:
    """A view of a store that hides the tensors of quantized matrices."""

    def __init__(self, store: TensorStore, taken: set[str]) -> None:
        self._store = store
        self._names = store.names() - taken
        self.dtype, self.get = store.dtype, store.get

    def names(self) -> set[str]:
        return set(self._names)


def words(tensor: StoredTensor) -> npt.NDArray[np.uint32]:
    """A stored int32 tensor as unsigned words of its shape.

    Raises:
        ModelError: the tensor has another type.
    """
    if tensor.dtype != "I32":
        msg = f"{tensor.name} has type {tensor.dtype}; only codes packed in int32 are supported"
        raise ModelError(msg)
    return tensor.data.view("<u4").reshape(tensor.shape)


def floats(tensor: StoredTensor) -> Float32:
    """A stored float tensor in fp32.

    Raises:
        ModelError: the tensor has no float type.
    """
    if tensor.dtype not in SOURCES:
        msg = f"{tensor.name} has type {tensor.dtype}; only float types are supported"
        raise ModelError(msg)
    rows = tensor.data.reshape(1, -1)
    return dequantize(QuantTensor(tensor.name, tensor.shape, SOURCES[tensor.dtype], rows))


def unpack(packed: npt.NDArray[np.uint32]) -> Bytes:
    """4-bit codes [..., 8 w] from words [..., w], lowest bits first."""
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    codes = (packed[..., None] >> shifts) & np.uint32(15)
    return codes.astype(np.uint8).reshape(*packed.shape[:-1], -1)


def pair_up(codes: Bytes) -> Bytes:
    """Bytes [n, k / 2] from codes [n, k]: element 2 i in the low nibble, 2 i + 1 in the high."""
    return codes[:, ::2] | (codes[:, 1::2] << np.uint8(4))


def expect(config: dict[str, Any], method: str, **wanted: Any) -> None:
    """Raise a ModelError that lists every setting of quantization_config unlike `wanted`."""
    bad = {k: config.get(k) for k, v in wanted.items() if config.get(k, v) != v}
    if bad:
        got = ", ".join(f"{k} = {str(v)[:40]}" for k, v in bad.items())
        need = ", ".join(f"{k} = {wanted[k]}" for k in bad)
        msg = (
            f"{method} checkpoint with {got} is not supported, only {need}; "
            "use the unquantized checkpoint with --quantization int4 or int8"
        )
        raise ModelError(msg)
