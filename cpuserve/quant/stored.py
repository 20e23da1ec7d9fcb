"""Stored tensors, which weight formats read, and the `Weights` of dense and GGUF files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from cpuserve.base.errors import ConfigError, ModelError
from cpuserve.program.weight_kinds import KINDS, SourceType, WeightKind

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from cpuserve.quant.base import QuantTensor

# Matrices of latent attention (MLA) that are split by heads. A part may be transposed, and a column
# of a quantized matrix cannot be packed as a row, so the parts are packed as dense matrices.
BY_HEADS = ("kv_b_proj.weight", ".wo_a.weight")
DENSE_KINDS: dict[str, WeightKind] = {
    "bfloat16": "dense_bf16",
    "float16": "dense_f16",
    "float32": "dense_f32",
}
QUANTIZED_KINDS: dict[SourceType, WeightKind] = {
    kind.source: kind.name for kind in KINDS if kind.source is not None
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor with its Hugging Face name, in the element type of its file.

    dtype: the name of the type in the file ("BF16", "Q4_1").
    shape: the logical shape, outermost dimension first.
    data: a flat uint8 view of the mapped file.
    row_order: row i is row row_order[i] of the file (None = the same order).
    release: a function that removes the pages of `data` from this process.
    check: a function that raises SourceChanged if the file has changed since its first call.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    data: npt.NDArray[np.uint8]
    row_order: npt.NDArray[np.int32] | None = None
    release: Callable[[], None] | None = None
    check: Callable[[], None] | None = None


class TensorStore(Protocol):
    """The tensors of one checkpoint, as views of mapped files that are not read yet."""

    def names(self) -> set[str]:
        """Return the name of each tensor, after renaming."""

    def dtype(self, name: str) -> str:
        """Return the element type that the file has for tensor `name`."""

    def get(self, name: str) -> StoredTensor:
        """Return the tensor; ModelError if its file has changed since it was opened."""


class WithoutTensors:
    """A view of a store that hides the tensors of quantized matrices."""

    def __init__(self, store: TensorStore, taken: set[str]) -> None:
        """taken: the names of the tensors to hide."""
        self._names = store.names() - taken
        self.dtype, self.get = store.dtype, store.get

    def names(self) -> set[str]:
        """Return the names of all tensors that are not hidden."""
        return set(self._names)


class StoredWeights:
    """The `Weights` of formats with rows that the packers read as stored (dense and GGUF)."""

    def __init__(self, store: TensorStore, sources: Mapping[str, SourceType]) -> None:
        """Raise ModelError for types that `sources` (file dtype -> source type) does not have."""
        self._store = store
        self._sources = sources
        self._names = store.names()
        _refuse_unsupported(store, self._names, sources)

    def names(self) -> set[str]:
        """Return the name of each tensor in the checkpoint, after renaming."""
        return set(self._names)

    def get(self, name: str) -> QuantTensor:
        """Return the tensor as rows of its source type: a view of the mapped file, not read yet."""
        from cpuserve.quant.base import QuantTensor

        stored = self._store.get(name)
        rows = stored.shape[0] if len(stored.shape) > 1 else 1
        return QuantTensor(
            name=name,
            shape=stored.shape,
            source=self._sources[stored.dtype],
            data=stored.data.reshape(rows, -1),
            row_order=stored.row_order,
            release=stored.release,
            check=stored.check,
        )

    def kind(self, name: str, dtype: str) -> WeightKind:
        """Return the weight kind: of the source type if it is quantized, otherwise of `dtype`."""
        source = self._sources[self._store.dtype(name)]
        if source in QUANTIZED_KINDS:
            return QUANTIZED_KINDS[source]
        if dtype not in DENSE_KINDS:
            msg = f"dtype {dtype!r} is not one of {', '.join(sorted(DENSE_KINDS))}"
            raise ConfigError(msg)
        return DENSE_KINDS[dtype]


def _refuse_unsupported(
    store: TensorStore, names: Iterable[str], sources: Mapping[str, SourceType]
) -> None:
    bad = sorted((n, store.dtype(n)) for n in names if store.dtype(n) not in sources)
    if not bad:
        return
    listed = ", ".join(f"{name} ({dtype})" for name, dtype in bad[:3])
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    msg = (
        f"unsupported tensor type {'/'.join(sorted({d for _, d in bad}))} in {listed}{more}; "
        f"supported: {', '.join(sources)}"
    )
    raise ModelError(msg)
