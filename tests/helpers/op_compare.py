"""Op-by-op comparison of an executor with the Interpreter: finds the first op that differs.

Each op of the interpreter gets the inputs that the same op of the executor had.
Therefore only the op that causes an error is reported, and not the later ops as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from cpuserve.program.operations.attention import Attention, RopeStoreKV
from cpuserve.program.operations.dense import Linear, Logits
from cpuserve.program.operations.entries import EntryAttention
from cpuserve.program.operations.experts import Dispatch, ExpertLinear, combined_from
from cpuserve.program.operations.indexer import SelectKeys
from cpuserve.program.operations.latent import HeadLinear, LatentStoreKV
from cpuserve.program.ops import Op, ValueId
from cpuserve.program.program import Program
from cpuserve.program.row_formats import (
    FLOAT_ROWS,
    TWO_TERMS,
    WHOLE_ROW,
    act_format,
    combined_format,
)
from cpuserve.program.view import HasWords

if TYPE_CHECKING:
    from cpuserve.program.interpret import Interpreter

Float32 = npt.NDArray[np.float32]

# If up to 10^4 products are added in another order, an fp32 sum changes by less than 1e-5
# of the largest element in the row. The fast exp and erf add a difference of the same size.
SUM_TOLERANCE = 2e-5
# Relative tolerance for each type of the KV cache. A key or a probability near the middle of two
# values of the type may be rounded up by one executor and down by the other.
# This rounding may change each element of the row by the distance between two values of the type.
STEP = {"bf16": 2.0**-8, "f16": 2.0**-11, "f32": 0.0}
# The tolerances for 8-bit KV caches, where attention rounds probabilities to bf16.
STEP |= {"int8": 2.0**-6, "fp8_e4m3": 2.0**-4, "int8_v4": 2.0**-4}


class Tappable(Protocol):
    """An executor that can report the inputs and the output of each op."""

    def tap(self, arrays: HasWords, op_index: int, /) -> tuple[list[Float32], Float32]:
        """Run the step `arrays`; return (inputs of the op, its output), each fp32 [T, width]."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first op that exceeds its tolerance, with the element that exceeds it most.

    op_index: the index of `op` in the Program.
    tap_index: the index of the same op in the executor.
    """

    op_index: int
    tap_index: int
    op: Op
    name: str
    row: int
    column: int
    got: float
    expected: float
    tolerance: float

    def __str__(self) -> str:
        return (
            f"op {self.op_index} ({type(self.op).__name__} {self.name}, executor op "
            f"{self.tap_index}) differs at [{self.row}, {self.column}]: {self.got:.7g}, expected "
            f"{self.expected:.7g} within {self.tolerance:.2g}"
        )


def compare(
    executor: Tappable,
    interpreter: Interpreter,
    arrays: HasWords,
    source_op: Sequence[int] | None = None,
) -> Difference | None:
    """Return the first op of this step with an output that differs beyond its tolerance, or None.

    source_op: the index of the Program op that each op of the executor implements
    (Lowered.source_op); None if both have the same ops.

    Call this function for every step of a sequence, from the first step on,
    because it also writes the interpreter's KV cache from the values of the executor.
    """
    program = interpreter.program
    origins = range(len(program.ops)) if source_op is None else source_op
    interpreter.begin(arrays)
    for index, op in enumerate(program.ops):
        taps = [i for i, origin in enumerate(origins) if origin == index]
        if not taps:
            msg = f"op {index} ({type(op).__name__}) has no op in the executor; lowering dropped it"
            raise ValueError(msg)
        inputs, got = _gather(executor, arrays, taps)
        lowered = source_op is not None
        expected = _run(interpreter, index, op, inputs, lowered)
        if isinstance(op, SelectKeys):
            expected = _settle(interpreter, op, inputs, got, expected)
        if lowered and isinstance(op, RopeStoreKV | LatentStoreKV):
            got, expected = _unpad_heads(got, op), expected[:, : op.q_heads * op.head_dim]
        found = _worst(got, expected, _tolerance(interpreter, op, expected))
        if found is not None:
            return Difference(index, taps[-1], op, _name(program, op), *found)
    return None


def stored_format(
    program: Program, kinds: Mapping[str, str], value: ValueId, activation_bits: int = 8
) -> str:
    """Return the row format of `value` in an executor.

    The format is "f32" unless all ops that read the value need the same other format.

    Results of experts that only Combine reads have the format of `combined_format`.
    """

    def of(weight: str) -> str:
        return act_format(kinds.get(weight, ""), activation_bits)

    if (experts := combined_from(value, program.ops)) is not None:
        return combined_format(of(experts.weights[0][0]))
    formats: set[str] = set()
    for op in program.ops:
        if isinstance(op, Linear | Logits) and op.x == value:
            weights = op.weights if isinstance(op, Linear) else (op.weight,)
            formats |= {of(w) for w in weights}
        elif isinstance(op, ExpertLinear) and op.x == value:
            formats.add(of(op.weights[0][0]))
        elif isinstance(op, HeadLinear) and op.x == value:
            formats.add("f32" if kinds.get(op.weight, "dense_f32") in FLOAT_ROWS else "bf16")
        elif isinstance(op, Dispatch) and op.x == value:
            formats.add(stored_format(program, kinds, op.out, activation_bits))
        elif value in op.reads():
            formats.add("f32")
    chosen = formats.pop() if len(formats) == 1 else "f32"
    in_pieces = any(
        op.written() == value
        for op in program.ops
        if isinstance(op, Linear | ExpertLinear | Attention)
    )
    by_heads = any(isinstance(op, HeadLinear) and op.out == value for op in program.ops)
    if by_heads and chosen.startswith("q8"):
        return "f32"
    # A scale of a whole row is only known once no thread adds a piece to the row any more.
    return "f32" if chosen in WHOLE_ROW and in_pieces else chosen


def _gather(
    executor: Tappable, arrays: HasWords, taps: Sequence[int]
) -> tuple[list[Float32], Float32]:
    """Return (inputs, output) of the executor ops `taps` as if they were one op.

    The inputs are the inputs of the first op.
    If a later op adds to a value, this value is an input as well.
    The output is the output of the last op.
    """
    inputs, got = executor.tap(arrays, taps[0])
    for tap in taps[1:]:
        more, got = executor.tap(arrays, tap)
        if len(inputs) == 1 and len(more) == 2:
            inputs = [inputs[0], more[1]]
    return inputs, got


def _run(
    interpreter: Interpreter, index: int, op: Op, inputs: list[Float32], lowered: bool
) -> Float32:
    import torch

    if lowered and isinstance(op, Attention):
        q = _unpad_heads(inputs[0], op)
        rest = np.zeros((len(q), 2 * op.kv_heads * op.head_dim), np.float32)
        inputs = [np.concatenate([q, rest], axis=1), *inputs[1:]]
    tensors = [torch.from_numpy(np.ascontiguousarray(x, np.float32)) for x in inputs]
    out: Float32 = interpreter.run_op(index, tensors).numpy()
    return out


def _settle(
    interpreter: Interpreter, op: SelectKeys, inputs: list[Float32], got: Float32, expected: Float32
) -> Float32:
    """Return `expected`, with the executor's selection in rows where the scores allow both.

    If only the executor or only the interpreter selects a key, the score of this key must equal
    the lowest selected score, up to the rounding of stored keys and of sums.
    """
    import torch

    out = expected.copy()
    values = [torch.from_numpy(np.ascontiguousarray(x, np.float32)) for x in inputs]
    for seq in range(interpreter.step.num_seqs):
        rows = interpreter.step.queries(seq)
        scores = op.scores(interpreter, seq, rows, *values).numpy()
        for row, score in zip(range(rows.start, rows.stop), scores, strict=True):
            ours, theirs = (set(x[x >= 0].astype(int)) for x in (expected[row], got[row]))
            differ = ours ^ theirs
            if not differ or len(ours) != len(theirs) or max(theirs) // op.pool >= len(score):
                continue
            finite = np.abs(score[np.isfinite(score)])
            bound = (SUM_TOLERANCE + 2 * STEP[interpreter.kv_type]) * finite.max()
            lowest = np.sort(score)[-op.keep]
            if all(abs(score[key // op.pool] - lowest) <= bound for key in differ):
                out[row] = got[row]
    return out


def _unpad_heads(q: Float32, op: RopeStoreKV | LatentStoreKV | Attention) -> Float32:
    """Return q [T, heads * padded head_dim] without the padding of the native executor."""
    return q.reshape(len(q), op.q_heads, -1)[:, :, : op.head_dim].reshape(len(q), -1)


def _tolerance(interpreter: Interpreter, op: Op, expected: Float32) -> Float32:
    size = np.abs(expected)
    top = size.max(axis=1, keepdims=True, initial=0.0)
    bound: Float32 = np.broadcast_to(SUM_TOLERANCE * top + 1e-6, size.shape).astype(np.float32)
    kv_type = interpreter.kv_type
    if isinstance(op, Attention | EntryAttention):
        bound += np.float32(STEP[kv_type]) * top
    target = op.written()
    stored = "f32"
    if target is not None:
        kinds, bits = interpreter.kinds, interpreter.activation_bits
        stored = stored_format(interpreter.program, kinds, target, bits)
    stores = isinstance(op, RopeStoreKV | LatentStoreKV)
    if stored == "bf16" or (stores and kv_type not in ("f16", "f32")):
        bound += np.float32(STEP["bf16"]) * size
    elif stored.startswith("q8"):
        width = size.shape[1]
        two_terms = stored in TWO_TERMS.values()
        group = {"q8g32": 32, "q8g128": 128, "q8g256": 256, "q8row": width}[
            stored.removesuffix("x2")
        ]
        padded = np.pad(size, ((0, 0), (0, -width % group)))
        # Rounding to int8 errs by at most half the distance of two codes: amax / 254.
        # A second int8 term divides this error by 254.
        per_half_step = 250 * (125 if two_terms else 1)
        steps = padded.reshape(len(padded), -1, group).max(axis=2) / per_half_step
        bound += np.repeat(steps, group, axis=1)[:, :width]
    return bound


def _worst(
    got: Float32, expected: Float32, tolerance: Float32
) -> tuple[int, int, float, float, float] | None:
    """Return (row, column, got, expected, tolerance) of the worst element.

    Returns None if no element exceeds its tolerance.
    """
    if got.shape != expected.shape:
        msg = f"the executor's op gave shape {got.shape}, but the interpreter {expected.shape}"
        raise ValueError(msg)
    excess = np.abs(got - expected) / tolerance
    excess[np.isnan(excess)] = np.inf
    if not excess.size or excess.max() <= 1.0:
        return None
    row, column = (int(i) for i in np.unravel_index(int(excess.argmax()), excess.shape))
    at = (row, column)
    return row, column, float(got[at]), float(expected[at]), float(tolerance[at])


def _name(program: Program, op: Op) -> str:
    target = op.written()
    return program.values[target].name if target is not None else "logits"
