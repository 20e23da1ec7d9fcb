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

# Indices into the list of column orders of a Lowering; None for columns that are in order.
Orders = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class HeadPart:
    """The rows of a tensor that make one head's matrix, or its transpose."""

    rows: slice
    transposed: bool


@dataclass(frozen=True, slots=True)
class MatrixLoad:
    """Pack these checkpoint tensors into native matrix `id`.

    part: pack this part alone; there is one tensor then. values: the tensors are dequantized first,
    because they cannot be packed together as they are.
    """

    id: int
    names: tuple[str, ...]
    part: HeadPart | None = None
    values: bool = False


@dataclass(frozen=True, slots=True)
class TableLoad:
    """Use checkpoint tensor `name` as native matrix `id`, with rows read from its mapped file."""

    id: int
    name: str


@dataclass(frozen=True, slots=True)
class VectorLoad:
    """Fill native vector `id` with `make(read)`; read(name) is a checkpoint tensor in fp32."""

    id: int
    make: Callable[[ReadFn], Float32]


@dataclass(frozen=True, slots=True)
class OpWeights:
    """The packed matrix [n, k] of weight kind `kind` that an op multiplies, with `num_bytes`.

    For an op with experts, n and `num_bytes` count the experts that one token chooses, and
    `expert_bytes` is the size of all experts of the op (0: it has none).
    """

    kind: str
    n: int
    k: int
    num_bytes: int
    expert_bytes: int = 0

    def read_bytes(self, tokens: int) -> float:
        """Bytes that a step of `tokens` reads if tokens choose all experts alike."""
        if not self.expert_bytes:
            return self.num_bytes
        return bytes_in_use(self.num_bytes, self.expert_bytes, tokens)


def bytes_in_use(chosen: int, experts: int, tokens: int) -> float:
    """Expected bytes of the experts that a step uses if tokens choose all experts alike.

    chosen: bytes of the experts that one token chooses; experts: bytes of all of them.
    """
    return experts * (1.0 - (1.0 - chosen / experts) ** tokens)
