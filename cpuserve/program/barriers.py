"""The barriers of a step of one token, counted from a Program."""

from __future__ import annotations

from cpuserve.program.program import Program


def num_barriers(program: Program) -> int:
    """Return the number of barriers in a step of one token: one after each op with claimed tasks.

    The last thread to arrive at a barrier runs all ops up to the next op with claimed tasks.
    """
    return sum(op.claimed for op in program.ops)
