"""Weights of a checkpoint, where a name may mean some rows of a tensor (program/parts.py)."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import numpy as np

from cpuserve.base.errors import ModelError
from cpuserve.program.parts import TensorPart, parse
from cpuserve.quant.base import BuiltTensor, QuantTensor

if TYPE_CHECKING:
    import numpy.typing as npt

    from cpuserve.program.weight_kinds import WeightKind
    from cpuserve.quant.base import Weights

    Bytes = npt.NDArray[np.uint8]

_DENSE = ("f32", "f16", "bf16")


def part_of(name: str, whole: QuantTensor, rows: slice, *, vector: bool) -> QuantTensor:
    """Return some rows of a tensor: a view if they are contiguous in the file, else a copy.

    The copy is made when it is read, because the tensor itself may be built only then.

    rows: the rows of `whole`, counted over all matrices of a stack.
    vector: whether `whole` is a vector or a stack of vectors; each number then counts as a row.
    """
    span = range(rows.start, rows.stop, rows.step or 1)
    count = len(span)
    row_bytes = whole.nbytes // math.prod(whole.shape if vector else whole.shape[:-1])

    def build(some: slice) -> Bytes:
        if vector:  # the selected numbers of the vector become one row
            return whole.cut(rows, row_bytes).reshape(1, -1)[some]
        wanted = span[some]
        return whole.cut(slice(wanted.start, wanted.stop, wanted.step), row_bytes)

    shape = (count,) if vector else (count, whole.shape[-1])
    built = isinstance(whole, BuiltTensor) or whole.row_order is not None
    if not vector and span.step == 1 and not built:
        data = whole.data.reshape(-1, row_bytes)[span.start : span.stop]
        order = whole.column_order
        release, check = whole.release, whole.check
        return QuantTensor(name, shape, whole.source, data, None, release, order, check)
    size = count * row_bytes
    return BuiltTensor(name, shape, whole.source, size, build, whole.release, whole.column_order)


def transposed(stored: QuantTensor) -> BuiltTensor:
    """Return a dense matrix [in, out], or each matrix of a stack, transposed to [out, in].

    Raises:
      ModelError: it is quantized.
    """
    if stored.source not in _DENSE:
        msg = f"{stored.name} is quantized, but only a dense matrix can be transposed"
        raise ModelError(msg)
    *outer, n_in, n_out = stored.shape
    count = math.prod(outer)
    element = f"u{stored.nbytes // math.prod(stored.shape)}"

    def build(rows: slice) -> Bytes:
        matrices = stored.data.reshape(-1).view(element).reshape(count, n_in, n_out)
        wanted = np.arange(count * n_out)[rows]
        out = np.empty((len(wanted), n_in), element)
        for matrix in range(wanted[0] // n_out, wanted[-1] // n_out + 1):
            at = slice(*np.searchsorted(wanted, (matrix * n_out, (matrix + 1) * n_out)))
            out[at] = matrices[matrix, :, wanted[at] - matrix * n_out]
        return out.view(np.uint8)

    shape = (*outer, n_out, n_in)
    return BuiltTensor(stored.name, shape, stored.source, stored.nbytes, build, stored.release)


# The stacks that have two matrices of each expert.
_PAIRS = {"gate_up_proj": ("gate_proj", "up_proj"), "w13": ("w1", "w3")}
# The matrices or biases of all experts in one tensor, with or without a suffix such as ".weight".
_STACK = re.compile(
    r"(?P<at>.*\.experts)\.(?P<part>\w+?_proj|w(?:[123]|13))(?P<kind>\.weight|[._]bias)?"
)


class PartWeights:
    """The `Weights` of a checkpoint in any format, and the parts of its tensors.

    If the checkpoint stores the matrices of all experts as one tensor,
    each matrix has the name that it has in other checkpoints: `mlp.experts.3.up_proj.weight`.
    The biases of experts have such names as well.

    Dense stacks of [in, out] are recognized by their shapes (Qwen3-VL with experts).
    A stack of gates and ups is called gate_up_proj, or w13 where the matrices are called w1 and w3.
    If the biases of `experts.down_proj` are called `experts.down_proj_bias`, the layout is
    as in gpt-oss: dense matrices are stored as [in, out], and the outputs of gate and up alternate.
    """

    def __init__(self, weights: Weights) -> None:
        """weights: the weights with whole tensors."""
        self._weights = weights
        self._stored = weights.names()
        self._names = set(self._stored)
        # Maps the name of an expert's matrix or bias to its part of a stored tensor.
        self._experts: dict[str, TensorPart] = {}
        self._cut: dict[str, QuantTensor] = {}  # the results of `get` for the names in _experts
        self._of: dict[str, list[str]] = {}  # the names of the parts of each stored stack
        self._stacks: dict[str, QuantTensor] = {}
        for name in self._stored:
            match = _STACK.fullmatch(name)
            if match is None:
                continue
            stack = self._whole(name)
            if len(stack.shape) != _dims(match["kind"]):
                continue
            self._names.remove(name)
            alternate = f"{match['at']}.down_proj_bias" in self._stored
            self._stacks[name] = stack
            names = _experts(name, match["at"], match["part"], stack.shape, alternate)
            self._experts |= names
            self._of[name] = list(names)
        self._names |= self._experts.keys()

    def _whole(self, name: str) -> QuantTensor:
        """Return a tensor that may have parts; a stack, which has many parts, is read only once."""
        if (stack := self._stacks.get(name)) is not None:
            return stack
        tensor = self._weights.get(name)
        by_inputs = f"{name}_bias" in self._stored or self._is_by_inputs(name)
        dense = tensor.source in _DENSE and len(tensor.shape) == 3
        return transposed(tensor) if by_inputs and dense else tensor

    def _is_by_inputs(self, name: str) -> bool:
        """Whether a stack of experts is stored as [in, out], as in published files of Qwen3-VL.

        Gate and up then are a stack of [hidden, 2 features], and down is one of [features, hidden].
        """
        at = name.rpartition(".")[0]
        names = f"{at}.gate_up_proj", f"{at}.down_proj"
        if name not in names or not self._stored.issuperset(names):
            return False
        both, down = (self._weights.get(each).shape for each in names)
        return len(both) == len(down) == 3 and both[1:] == (down[2], 2 * down[1])

    def names(self) -> set[str]:
        """Return the name of each tensor, after renaming; parts are not listed."""
        return set(self._names)

    def parts_of(self, name: str) -> list[str]:
        """Return each name of a stored tensor: its own, or one for each expert's matrix in it."""
        return self._of.get(name, [name])

    def get(self, name: str) -> QuantTensor:
        """Return the tensor `name`, or the rows of a stored tensor that `name` means.

        Raises:
            ModelError: the tensor does not have these rows.
        """
        if (cut := self._cut.get(name)) is not None:
            return cut
        expert = self._experts.get(name)
        part = expert or parse(name)
        if part is None:
            return self._weights.get(name)
        tensor = self._part(name, part)
        if expert is not None:
            self._cut[name] = tensor
        return tensor

    def _part(self, name: str, part: TensorPart) -> QuantTensor:
        whole = self._whole(part.tensor)
        if part.columns and len(whole.shape) > 1:
            whole = transposed(whole)
        found = part.of(whole.shape)
        if found is None:
            raise ModelError(_lacks(part, whole.shape))
        vector = len(whole.shape) == (1 if part.index is None else 2)
        if vector and whole.source not in _DENSE:
            msg = f"{part.tensor} is quantized, but the model reads parts of dense vectors only"
            raise ModelError(msg)
        return part_of(name, whole, found, vector=vector)

    def kind(self, name: str, dtype: str) -> WeightKind:
        """Return the weight kind of the tensor; a part has the kind of the whole tensor."""
        part = self._experts.get(name) or parse(name)
        return self._weights.kind(name if part is None else part.tensor, dtype)


def _dims(kind: str | None) -> int:
    """Return the number of dimensions of a stack: 2 for vectors (biases), 3 for matrices."""
    return 2 if kind and kind.endswith("bias") else 3


def _experts(
    name: str, at: str, part: str, shape: tuple[int, ...], alternate: bool
) -> dict[str, TensorPart]:
    """Return the rows in stack `name` of each expert's matrix or bias, by its own name below `at`.

    alternate: whether gate and up are one matrix with alternating rows.
    """
    matrices = _PAIRS.get(part, (part,))
    suffix = "bias" if len(shape) == _dims("bias") else "weight"
    each = shape[1] // len(matrices)
    first, step = (1, len(matrices)) if alternate else (each, 1)
    end = (each - 1) * step + 1
    return {
        f"{at}.{e}.{matrix}.{suffix}": TensorPart(name, i * first, i * first + end, step, e)
        for e in range(shape[0])
        for i, matrix in enumerate(matrices)
    }


def _lacks(part: TensorPart, shape: tuple[int, ...]) -> str:
    at = "" if part.index is None else f" of matrix {part.index}"
    return (
        f"{part.tensor} has shape {list(shape)}, but the model reads rows up to "
        f"{part.end - 1}{at}; the checkpoint does not fit its config"
    )
