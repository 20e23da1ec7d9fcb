"""Names for parts of stored tensors. A Program can read such a part like a whole tensor.

Some checkpoints store several matrices as one tensor: gate and up of an MLP (Phi-3), queries,
keys and values of all heads (GPT-NeoX), or a matrix of every expert (Granite).
Other checkpoints have the rows of a matrix in another order than the ops, such as GLM-4,
where RoPE rotates neighbouring dimensions, or the transpose of a matrix (GPT-2).

    "mlp.gate_up_proj[0:160].weight"          rows 0 to 159 of "mlp.gate_up_proj.weight"
    "moe.input_linear[3][160:320].weight"     rows 160 to 319 of its fourth matrix, [3]
    "self_attn.q_proj[1:64:2].weight"         rows 1, 3, ... 63
    "attn.c_attn[:,64:128].weight"            columns 64 to 127, each as a row
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from cpuserve.program.program import WeightNeed

_PART = re.compile(r"([^\[\]]+)(?:\[(\d+)\])?\[(:,)?(\d+):(\d+)(?::(\d+))?\]([^\[\]]*)")


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Rows [first, end) of a stored tensor, or of matrix `index` of a stack of matrices.

    step: the distance from each row to the next (1: successive rows).
    columns: whether the rows are columns of the stored matrix (rows of its transpose).
      In a vector, a row is one number.
    """

    tensor: str
    first: int
    end: int
    step: int = 1
    index: int | None = None
    columns: bool = False

    def of(self, shape: tuple[int, ...]) -> slice | None:
        """Return the rows of the part in a tensor of this shape.

        Rows are counted over all matrices of a stack. Returns None if the tensor lacks the rows.
        A row of a vector is one number.
        """
        outer = 1 if self.index is None else 2
        if len(shape) < outer or not self.first < self.end <= shape[outer - 1] or self.step < 1:
            return None
        if self.index is None:
            return slice(self.first, self.end, self.step)
        if self.index >= shape[0]:
            return None
        before = self.index * shape[1]
        return slice(before + self.first, before + self.end, self.step)


def rows(name: str, first: int, count: int, *, step: int = 1, index: int | None = None) -> str:
    """Return the name of `count` rows of tensor `name` (or its matrix `index`) from `first` on.

    step: the distance from each row to the next (1: successive rows).
    """
    matrix = "" if index is None else f"[{index}]"
    every = "" if step == 1 else f":{step}"
    return f"{name}{matrix}[{first}:{first + (count - 1) * step + 1}{every}]"


def columns(name: str, first: int, count: int) -> str:
    """Return the name of `count` columns of matrix `name` from `first` on, each read as a row."""
    return f"{name}[:,{first}:{first + count}]"


def parse(name: str) -> TensorPart | None:
    """Return the part that has this name; None if it is the name of a whole tensor."""
    if not (match := _PART.fullmatch(name)):
        return None
    stem, index, across, first, end, step, rest = match.groups()
    matrix = None if index is None else int(index)
    return TensorPart(stem + rest, int(first), int(end), int(step or 1), matrix, across is not None)


def stored_needs(needs: Iterable[WeightNeed]) -> tuple[WeightNeed, ...]:
    """Return the whole tensors that a checkpoint must store for `needs`, in the same order.

    The shape of a tensor has as many rows as needed for the last row that is read.
    """
    found: dict[str, WeightNeed] = {}
    for need in needs:
        part = parse(need.name)
        if part is None:
            found[need.name] = need
            continue
        matrices = () if part.index is None else (part.index + 1,)
        width = need.shape[1:]
        shape = (*matrices, *((*width, part.end) if part.columns else (part.end, *width)))
        before, use = found.get(part.tensor), need.use
        if before is not None and len(before.shape) == len(shape):
            shape = tuple(map(max, before.shape, shape))
        if before is not None and before.use != "linear":
            use = before.use
        found[part.tensor] = WeightNeed(part.tensor, shape, need.role, use)
    return tuple(found.values())
