"""Low-rank adapters (LoRA) in a Program: modules that have adapters, and their matrices.

An adapter adds scale * B A x to the result of a linear of x (Hu et al. 2021). To a row of an
embedding table it adds scale * B a, where a is the row of the same token in a table [vocab, rank]
of the adapter. The tables of all adapters are one matrix [vocab, in_tables * rank].
The matrix B of each adapter is 0 in the columns that belong to other adapters.
All adapters of a model have the same rank in its Program:
matrices of a smaller rank are padded with zeros, which changes no sum.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

SCALES = "adapters.scales"  # the vector with the scales of all adapters
_TABLE = ".lora_tables"
_MATRIX = re.compile(r"(?P<modules>.+)\.lora_(?P<side>[AB])\.(?P<adapter>\d+)")


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters of a model: their number, common rank, and the modules that adapters change.

    in_tables: only the first `in_tables` adapters have columns in the common tables of the
      embedding modules.
    """

    count: int
    rank: int
    modules: frozenset[str]
    in_tables: int = 0


@dataclass(frozen=True, slots=True)
class MatrixName:
    """Identifies matrix A of a module, or the common matrix B of modules with adjacent outputs."""

    modules: tuple[str, ...]
    side: str
    adapter: int


def name_a(module: str, adapter: int) -> str:
    """Return the name of matrix A [rank, inputs] of an adapter for a module."""
    return f"{module}.lora_A.{adapter}"


def name_b(modules: Sequence[str], adapter: int) -> str:
    """Return the name of an adapter's common matrix B [sum of outputs, modules * rank].

    Each module has a block on the diagonal of the matrix; all other blocks are 0.
    """
    return f"{'+'.join(modules)}.lora_B.{adapter}"


def name_table(module: str) -> str:
    """Return the name, without ".weight", of the common table A of an embedding module."""
    return f"{module}{_TABLE}"


def module_of_table(name: str) -> str | None:
    """Return the embedding module of the common table `name`; None if `name` is another tensor."""
    suffix = f"{_TABLE}.weight"
    return name.removesuffix(suffix) if name.endswith(suffix) else None


def parse(name: str) -> MatrixName | None:
    """Return the adapter matrix with this name; None if `name` is another tensor."""
    match = _MATRIX.fullmatch(name)
    if match is None:
        return None
    return MatrixName(tuple(match["modules"].split("+")), match["side"], int(match["adapter"]))
