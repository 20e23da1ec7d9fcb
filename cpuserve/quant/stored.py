"""Stored tensors, the input of a weight format, and the `Weights` of dense and GGUF files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from cpuserve.errors import ConfigError, ModelError
from cpuserve.program.weight_kinds import KINDS, SourceType, WeightKind

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from cpuserve.quant.base import QuantTensor

# Matrices of latent attention (MLA), which are split by heads. A part may be transposed, and a
# column of a quantized matrix cannot be packed as a row, so parts are packed as dense matrices.
BY_HEADS = ("kv_b_proj.weight",)
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
    """One tensor under its Hugging Face name, in the element type that its file declares.

    dtype: the file's name of the type ("BF16", "Q4_1").
    shape: logical shape, outermost first.
    data: flat uint8 view of the file mapping.
    row_order and release: as in `QuantTensor`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    data: npt.NDArray[np.uint8]
    row_order: npt.NDArray[np.int32] | None = None
    release: Callable[[], None] | None = None


class TensorStore(Protocol):
    """The tensors of one checkpoint, as views of file mappings that are not read yet."""

    def names(self) -> set[str]:
        """Every tensor name, after renaming."""

    def dtype(self, name: str) -> str:
        """The element type the file declares for `name`."""

    def get(self, name: str) -> StoredTensor:
        """The tensor; ModelError if the file changed since it was opened."""


class WithoutTensors:
    """A view of a store that hides the tensors of quantized matrices."""

    def __init__(self, store: TensorStore, taken: set[str]) -> None:
        """taken: the hidden tensors."""
        self._names = store.names() - taken
        self.dtype, self.get = store.dtype, store.get

    def names(self) -> set[str]:
        """All tensors that are not hidden."""
        return set(self._names)


class StoredWeights:
    """`Weights` for formats with stored rows that the packers read directly (dense and GGUF)."""

    def __init__(self, store: TensorStore, sources: Mapping[str, SourceType]) -> None:
        """Raise ModelError for types that are not in `sources` (file dtype to source type)."""
        self._store = store
        self._sources = sources
        self._names = store.names()
        _refuse_unsupported(store, self._names, sources)

    def names(self) -> set[str]:
        """Every tensor name in the checkpoint, after renaming."""
        return set(self._names)

    def get(self, name: str) -> QuantTensor:
        """The tensor as rows of its source type, a view of the mapping that is not read yet."""
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
        )

    def kind(self, name: str, dtype: str) -> WeightKind:
        """The weight kind: from the source type of a quantized tensor, from `dtype` of others."""
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
