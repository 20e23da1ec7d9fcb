"""The barriers of a step of one token, counted from a Program."""

from __future__ import annotations

from cpuserve.program.program import Program


def num_barriers(program: Program) -> int:
    """Return the number of barriers in a step of one token.

    A barrier follows each op that is divided into tasks for several threads (`Op.claimed`).
    The last thread to arrive at a barrier runs all ops up to the next op with such tasks.
    """
    return sum(op.claimed for op in program.ops)
