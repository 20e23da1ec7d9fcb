"""The numbers of weights of a Program, and the floats that a token of selected layers reads."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from cpuserve.program.operations.attention import Attention
from cpuserve.program.operations.entries import EntryAttention
from cpuserve.program.operations.experts import ExpertLinear
from cpuserve.program.ops import ValueId
from cpuserve.program.program import Program


def weight_counts(program: Program) -> tuple[int, int]:
    """Return the number of weights (in matrices, in all tensors), from the Program's shapes."""
    matrices = sum(math.prod(need.shape) for need in program.weights if need.role == "matrix")
    return matrices, sum(math.prod(need.shape) for need in program.weights)


def expert_weights_of(program: Program) -> tuple[int, int, int]:
    """Return the number of weights in all experts, in those that one token reads, and in one.

    The last number counts all matrices of the largest expert.
    """
    linears = [op for op in program.ops if isinstance(op, ExpertLinear)]
    sizes = [sum(op.features) * op.in_features for op in linears]
    every = sum(size * len(op.weights) for size, op in zip(sizes, linears, strict=True))
    one: Counter[ValueId] = Counter()  # by routing: of a layer
    for size, op in zip(sizes, linears, strict=True):
        one[op.routing] += size
    chosen = sum(size * op.chosen for size, op in zip(sizes, linears, strict=True))
    return every, chosen, max(one.values(), default=0)


def selected_floats(program: Program, positions: int) -> int:
    """Return the floats of the keys and values of a head that a token reads in selected layers.

    positions: the most tokens of a text.
    """
    attentions = [op for op in program.ops if isinstance(op, Attention)]
    halves = [1 if program.cache[op.layer].latent else 2 for op in attentions]
    sizes = (op.keep * op.head_dim * n for op, n in zip(attentions, halves, strict=True))
    return max([*sizes, *_entry_floats(program, positions)], default=0)


def _entry_floats(program: Program, positions: int) -> Iterator[int]:
    """Yield the floats of the rows that a token copies, for each op that reads entries."""
    for op in program.ops:
        if isinstance(op, EntryAttention):
            rows = min(op.window, positions)
            if op.selection is not None:
                rows += min(positions, program.values[op.selection].width + 1) // op.pool
            elif op.entries is not None:
                rows += positions // op.pool
            yield rows * op.head_dim
