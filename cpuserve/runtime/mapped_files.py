"""The files that a native executor reads while it runs: mapped tables of rows, and mapped weights.

Without the checks, a file that is cut would kill the process (SIGBUS), and one that is
overwritten would change responses without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from cpuserve.program.lower import Lowered
from cpuserve.quant.base import Weights
from cpuserve.runtime.executor import Bytes

Check = Callable[[], None]


class RowTables(Protocol):
    """The method of _C.Executor for tables of rows."""

    def load_table(self, matrix: int, rows: Bytes, type: str) -> None:
        """Read rows of a matrix in these bytes, which are not copied."""


class MappedFiles:
    """The checks of all files that an executor reads in its steps."""

    def __init__(self, weights: Check | None) -> None:
        """weights: the check of the file with the packed weights; None if they are in memory."""
        self._checks = {} if weights is None else {weights: None}

    def load_tables(self, native: RowTables, lowered: Lowered, weights: Weights) -> None:
        """Set the tables that the executor reads rows of in the mapped files of the model."""
        for table in lowered.tables:
            tensor = weights.get(table.name)
            if tensor.check is not None:
                tensor.check()
                self._checks[tensor.check] = None
            native.load_table(table.id, tensor.data, tensor.source)

    def check(self) -> None:
        """Raise SourceChanged if a file has other content than at the start."""
        for check in self._checks:
            check()
