"""The weights that lowering asks the native executor to load, and their sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # building a program needs no numpy
    import numpy as np
    import numpy.typing as npt

    Float32 = npt.NDArray[np.float32]
    ReadFn = Callable[[str], Float32]

# Indices into the list of column orders of a Lowering. None: the columns are not reordered.
Orders = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class HeadPart:
    """Rows of a tensor that form the matrix of one attention head, or its transpose."""

    rows: slice
    transposed: bool


@dataclass(frozen=True, slots=True)
class MatrixLoad:
    """Instruction to pack the checkpoint tensors `names` into native matrix `id`.

    part: the part of a tensor that is packed (`names` then has one name); None: whole tensors.
    values: whether the tensors are dequantized before packing, because their columns are in
      different orders.
    """

    id: int
    names: tuple[str, ...]
    part: HeadPart | None = None
    values: bool = False


@dataclass(frozen=True, slots=True)
class TableLoad:
    """Instruction to read the rows of native matrix `id` from the mapped tensor `name`."""

    id: int
    name: str


@dataclass(frozen=True, slots=True)
class VectorLoad:
    """Instruction to fill native vector `id` with make(read); read(name) returns fp32 tensors."""

    id: int
    make: Callable[[ReadFn], Float32]


@dataclass(frozen=True, slots=True)
class OpWeights:
    """Weight kind, shape [n, k] and packed bytes of the matrix that an op multiplies.

    For an op with experts, n and `num_bytes` are sums over the experts that one token chooses.
    `expert_bytes` is the size of all experts of the op (0: the op has no experts).
    """

    kind: str
    n: int
    k: int
    num_bytes: int
    expert_bytes: int = 0

    def read_bytes(self, tokens: int) -> float:
        """Return the bytes that a step of `tokens` tokens reads if experts are equally probable."""
        if not self.expert_bytes:
            return self.num_bytes
        return bytes_in_use(self.num_bytes, self.expert_bytes, tokens)


def bytes_in_use(chosen: int, experts: int, tokens: int) -> float:
    """Return the expected bytes of the experts that a step of `tokens` tokens reads.

    All experts are equally probable.


    chosen: bytes of the experts that one token chooses. experts: bytes of all experts.
    """
    return experts * (1.0 - (1.0 - chosen / experts) ** tokens)
