"""Data flow of a Program: the operations that use each value."""

from __future__ import annotations

from cpuserve.program.ops import Op, ValueId
from cpuserve.program.program import Program


def uses(program: Program) -> dict[ValueId, list[Op]]:
    """Return the ops that read or write each value, in program order."""
    found: dict[ValueId, list[Op]] = {value.id: [] for value in program.values}
    for op in program.ops:
        for value in {*op.reads(), op.written()}:
            if value is not None:
                found[value].append(op)
    return found


def last_uses(program: Program) -> dict[ValueId, int]:
    """Return the index of the last op that reads or writes each value."""
    last: dict[ValueId, int] = {}
    for index, op in enumerate(program.ops):
        for value in (*op.reads(), op.written()):
            if value is not None:
                last[value] = index
    return last
