"""Matrices that a checkpoint stores rotated, as the ternary Bonsai 2 models do.

A row w of such a matrix is H (s * w), where H is the Hadamard matrix of `block` rows divided by the
square root of `block`, applied to each block of columns, and s has the signs 1 and -1 of columns.
H is its own inverse, so the product with a row x is that of the stored row with H (s * x).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotated matrices of a model; tensors have their full names.

    matrices: the matrices that multiply rotated rows.
    tables: the embeddings with rotated rows, which may be output heads as well.
    signs: for each number of columns the signs, as bits (1: -1), the lowest bit first; all signs
      are 1 for numbers that it does not have.
    grouped: those of `matrices` that read value heads with the heads of a key head side by side,
      where the operations before write the first value head of each key head first.
    value_width: columns of such a head.
    key_heads: number of key heads.
    """

    block: int
    matrices: frozenset[str]
    tables: frozenset[str] = frozenset()
    signs: dict[int, bytes] = field(default_factory=dict)
    grouped: frozenset[str] = frozenset()
    value_width: int = 1
    key_heads: int = 1


def sign_values(bits: bytes, width: int) -> npt.NDArray[np.float32]:
    """Return `width` signs, 1 or -1, from bits as in `Rotation.signs`; b"": all are 1."""
    import numpy as np

    if not bits:
        return np.ones(width, np.float32)
    found = np.unpackbits(np.frombuffer(bits, np.uint8), count=width, bitorder="little")
    return 1 - 2 * found.astype(np.float32)
