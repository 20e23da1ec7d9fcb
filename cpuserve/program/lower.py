"""Lower a Program to the native executor: weight kinds, row formats, shared buffers.

The Program defines the computation; lowering chooses how its values are stored.
The kernels of a weight kind multiply activation rows of one format (ActFormat in
`csrc/kernels/table/rows.h`), such as int8 with a scale for every 32 inputs. If all ops that read
a value are linears that need the same format, the op that produces the value stores it in that
format. Results of experts that only Combine reads are bf16, unless the activations of the experts
are more precise. Other values are fp32 and are converted before each linear.
Values with disjoint lifetimes share a buffer.

Some matrices are stored with their columns in another order (the activation order of GPTQ).
Before the activations of such a matrix are quantized, their columns are put into this order.

Operations lower themselves (`operations/`), with the buffers, matrices and vectors of a Lowering.
"""

from __future__ import annotations

import functools
import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import cpuserve._C as _C
from cpuserve.base.errors import ModelError
from cpuserve.program.dataflow import last_uses, uses
from cpuserve.program.loads import (
    MatrixLoad,
    OpWeights,
    Orders,
    TableLoad,
    VectorLoad,
)
from cpuserve.program.ops import Joined, Op, Rope, ValueId
from cpuserve.program.program import Program, group_of
from cpuserve.program.row_formats import (
    CONVERTED_KIND,
    DOT_OF_KIND,
    KV_ROW_FORMAT,
    REORDERED,
    act_format,
)
from cpuserve.program.tables import rope_tables

if TYPE_CHECKING:
    from cpuserve.program.loads import Float32, ReadFn

Order = npt.NDArray[np.int64]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Lowered:
    """The result of lowering, from which the native executor is built.

    Native op i implements Program op `source_op[i]` and multiplies the matrix `op_weights[i]`,
    if it has one. A decode step of one sequence reads `read_bytes` of packed weights:
    all linears, the chosen experts and lm_head, but not the embedding row and adapters.
    `expert_read_bytes` is the part of `read_bytes` for the chosen experts.
    All experts together have `expert_bytes`,
    and a matrix of one expert has at most `expert_matrix_bytes`.
    A prompt token costs 2 x `linear_weights` operations (without lm_head).
    `adapter_scales` is the id of the native vector with the scales of the adapters
    (-1: there are no adapters).
    `cache_reads` has (cache layer, window in tokens) for each attention op;
    several ops may read the same cache layer.
    `partitions` is Program.partitions with the numbers of native ops.
    """

    native: _C.Program
    matrices: list[MatrixLoad] = field(default_factory=list)
    tables: list[TableLoad] = field(default_factory=list)
    vectors: list[VectorLoad] = field(default_factory=list)
    source_op: list[int] = field(default_factory=list)
    op_weights: list[OpWeights | None] = field(default_factory=list)
    read_bytes: int = 0
    expert_bytes: int = 0
    expert_read_bytes: int = 0
    expert_matrix_bytes: int = 0
    linear_weights: int = 0
    adapter_scales: int = -1
    cache_reads: list[tuple[int, int]] = field(default_factory=list)
    partitions: list[tuple[int, bool]] = field(default_factory=list)

    def step_bytes(self, sequences: int) -> float:
        """Return the bytes of packed weights that a decode step of `sequences` sequences reads.

        Of the experts, only those that the step probably uses are counted (all equally probable).
        """
        return sum(w.read_bytes(sequences) for w in self.op_weights if w is not None)

    def cache_bytes(self, keys: int, token_bytes: Sequence[int]) -> int:
        """Return the bytes of the KV cache that attention reads for one token with `keys` keys.

        token_bytes: the bytes of one token in each cache layer.
        """
        return sum(token_bytes[layer] * min(keys, w or keys) for layer, w in self.cache_reads)

    @property
    def dot(self) -> str:
        """Return the dot-product type of most weights, by its name in the hardware probes."""
        counts: dict[str, int] = {}
        for weights in filter(None, self.op_weights):
            dot = DOT_OF_KIND.get(weights.kind, "f32")
            counts[dot] = counts.get(dot, 0) + weights.n * weights.k
        return max(counts, key=counts.__getitem__, default="f32")


@functools.cache
def _fields_of_operations() -> dict[str, list[str]]:
    return _C.operation_fields()


class Lowering:
    """Lowers the ops of a Program in one pass; `run()` returns the Lowered.

    kind_of, order_of: functions that return the weight kind and the column order of a matrix;
      an order of None means that the columns of the matrix are not reordered.
    is_mapped: a function; it returns whether rows of a tensor can be read from its mapped file.
    """

    def __init__(
        self,
        program: Program,
        kind_of: Callable[[str], str],
        *,
        isa: str,
        max_tokens: int,
        max_seqs: int,
        max_position: int,
        kv_type: str,
        activation_bits: int = 8,
        groups: Sequence[Sequence[int]] = (),
        order_of: Callable[[str], Order | None] = lambda _: None,
        is_mapped: Callable[[str], bool] = lambda _: False,
        long_rope: bool = False,
    ) -> None:
        self.program = program
        self.is_mapped = is_mapped
        self._long_rope = long_rope
        self.group_of = group_of(program, groups)
        self._stored_kind = functools.cache(kind_of)
        self._stored_order = order_of
        self._orders: list[Order] = []
        self._order_ids: dict[str, int | None] = {}
        self._unordered: set[str] = set()
        self.max_position = max_position
        self.kv_type = kv_type
        self.activation_bits = activation_bits
        self.out = Lowered(_C.Program(isa, max_tokens, max_seqs))
        self.native = self.out.native
        self._matrices: dict[tuple[tuple[str, ...], bool], int] = {}
        self._vectors: dict[object, int] = {}
        self.tables: dict[str, int] = {}  # lookup table ids by weight name
        self._width = {v.id: v.width for v in program.values}
        self._rows = {v.id: (v.copies, v.fold) for v in program.values}
        self._settle_experts()
        self.uses = uses(program)
        self._last_use = last_uses(program)
        self.formats = {v.id: self.choose_format(v.id) for v in program.values}
        self._buffer: dict[ValueId, int] = {}
        self._free: dict[tuple[int, str, tuple[int, int]], list[int]] = {}
        self.queries: dict[ValueId, tuple[int, tuple[int, str]]] = {}
        self._converted: dict[tuple[ValueId, str, Orders], int] = {}

    def run(self) -> Lowered:
        """Lower every op in order."""
        for cache, group in zip(self.program.cache, self.group_of, strict=True):
            if cache.key_width != cache.value_width:
                msg = "kernels need keys and values of one width, not of two"
                raise ModelError(msg)
            if cache.latent:
                self.native.latent_layer(cache.key_width, group)
            else:
                self.native.kv_layer(cache.heads, cache.key_width, group)
        for index, op in enumerate(self.program.ops):
            self._op = index
            op.lower(self)
            self._retire(op)
        self.out.partitions = [
            (bisect_left(self.out.source_op, first), windowed)
            for first, windowed in self.program.partitions
        ]
        return self.out

    # -- values ------------------------------------------------------------------------------

    def choose_format(self, value: ValueId) -> str:
        """Return the row format that a value is stored in.

        All ops that read or write it support this format.
        """
        writers = [op for op in self.uses[value] if op.written() == value]
        for op in writers:
            if (own := op.own_format(self)) is not None:
                return own
        wanted: set[str] = set()
        for op in self.uses[value]:
            if value in op.reads():
                wanted |= op.read_formats(value, self)
        chosen = wanted.pop() if len(wanted) == 1 else "f32"
        return chosen if all(op.can_write(chosen, self) for op in writers) else "f32"

    def act_format(self, weight: str) -> str:
        """Return the row format of the activations that `weight` is multiplied with."""
        return act_format(self.kind_of(weight), self.activation_bits)

    def read_format(self, weight: str) -> str:
        """Return the best row format for activations that only the matrix `weight` reads."""
        return self.act_format(weight) if self.order(weight) is None else "f32"

    def take(self, width: int, fmt: str, rows: tuple[int, int] = (1, 1)) -> int:
        """Return the id of a buffer for rows in format `fmt` that no live value uses.

        rows: (copies, fold) of the value (Value).
        """
        free = self._free.get((width, fmt, rows))
        if free:
            return free.pop()
        return self.native.value(f"{fmt}x{width}", width, fmt, *rows)

    def give(self, buffer: int, width: int, fmt: str, rows: tuple[int, int] = (1, 1)) -> None:
        """Mark a buffer as unused, so that values of later ops can have it."""
        self._free.setdefault((width, fmt, rows), []).append(buffer)

    def take_queries(self, value: ValueId, heads: int, head_dim: int) -> int:
        """Return a buffer for the queries of the value qkv, from which attention will read them."""
        key = (heads * (-(-head_dim // 16) * 16), KV_ROW_FORMAT[self.kv_type])
        q = self.take(*key)
        self.queries[value] = (q, key)
        return q

    def value(self, value: ValueId) -> int:
        """Return the id of the buffer of a value, in the row format that the value is stored in."""
        if value not in self._buffer:
            self._buffer[value] = self.take(
                self._width[value], self.formats[value], self._rows[value]
            )
        return self._buffer[value]

    def stored_as(
        self, value: ValueId, fmt: str, orders: Orders = (), routing: ValueId | None = None
    ) -> int:
        """Return the buffer with `value` in format `fmt`.

        Appends a conversion if another format is stored.

        orders: the column order of the value, or one column order for each expert of `routing`.
        """
        if self.formats[value] == fmt and not orders:
            return self.value(value)
        key = (value, fmt, orders)
        if key not in self._converted:
            buffer = self.take(self._width[value], fmt, self._rows[value])
            fields = {"x": self.value(value), "out": buffer}
            if orders:
                fields["order"] = self._columns_in(orders, self._width[value])
            if len(orders) > 1 and routing is not None:
                fields["routing"] = self.value(routing)
            self._append("convert", fields)
            self._converted[key] = buffer
        return self._converted[key]

    def _retire(self, op: Op) -> None:
        """Drop converted copies of the value that `op` wrote, and free buffers after last use."""
        out = op.written()
        touched = {v for v in (*op.reads(), out) if v is not None}
        for made in list(self._converted):
            of, fmt, _ = made
            if of == out or self._last_use[of] == self._op:
                buffer = self._converted.pop(made)
                self.give(buffer, self._width[of], fmt, self._rows[of])
        for value in touched:
            if self._last_use[value] != self._op:
                continue
            if value in self._buffer:
                self.give(
                    self._buffer.pop(value),
                    self._width[value],
                    self.formats[value],
                    self._rows[value],
                )
            if value in self.queries:
                buffer, key = self.queries.pop(value)
                self.give(buffer, *key)

    def add(
        self, op: Op, name: str | None = None, read: OpWeights | None = None, **fields: Any
    ) -> None:
        """Append a native op with `fields`, and with fields of `op` that are called the same.

        The id of the buffer replaces a value of `op`, and -1 a value that is None. If another field
        of `op` is None, the native op has its default.

        name: the native op; by default the name of the class, such as rms_norm for RmsNorm.
        read: the matrix that the native op multiplies.
        """
        name = name or op.native_name()
        for own in _fields_of_operations()[name]:
            given = getattr(op, own, None)
            if own in fields:
                continue
            if own in op.value_fields():
                fields[own] = -1 if given is None else self.value(given)
            elif given is not None:
                fields[own] = given
        self._append(name, fields, read)

    def lowered_since(self, ops: int) -> int:
        """Return the number of native ops so far of this op and the `ops` ops before it."""
        return len(self.out.source_op) - bisect_left(self.out.source_op, self._op - ops)

    def _append(self, name: str, fields: dict[str, Any], read: OpWeights | None = None) -> None:
        getattr(self.native, name)(**fields)
        self.out.source_op.append(self._op)
        self.out.op_weights.append(read)

    # -- weights -----------------------------------------------------------------------------

    def kind_of(self, weight: str) -> str:
        """Return the weight kind of a matrix."""
        return CONVERTED_KIND if weight in self._unordered else self._stored_kind(weight)

    def order(self, weight: str) -> int | None:
        """Return the index in `_orders` of a matrix's column order; None if it is not reordered."""
        if weight in self._unordered:
            return None
        if weight not in self._order_ids:
            found = self._stored_order(weight) if self.kind_of(weight) in REORDERED else None
            self._order_ids[weight] = None if found is None else self._order_id(found)
        return self._order_ids[weight]

    def _order_id(self, order: Order) -> int:
        for i, known in enumerate(self._orders):
            if np.array_equal(known, order):
                return i
        self._orders.append(order)
        return len(self._orders) - 1

    def orders_of(self, weight: str) -> Orders:
        """Return the column order of a matrix for `stored_as`; () if it is not reordered."""
        order = self.order(weight)
        return () if order is None else (order,)

    def layout(self, weight: str) -> tuple[str, int | None]:
        """Return (weight kind, column order) of a matrix.

        Matrices that are packed as one matrix must have equal kinds and equal orders.
        """
        return self.kind_of(weight), self.order(weight)

    def _settle_experts(self) -> None:
        """Find experts with different column orders in gate and up, which cannot be one matrix."""
        for op in self.program.ops:
            together = op.packed_together()
            if any(len({self.order(name) for name in names}) > 1 for names in together):
                self._unordered |= {name for names in together for name in names}
        if self._unordered:
            log.info(
                "experts whose gate and up have different activation orders are converted to int8 "
                "in groups of 32 while loading"
            )

    def _columns_in(self, orders: Orders, width: int) -> int:
        """Return the id of a native vector: the column numbers of each of `orders`, in sequence."""

        def make(_: ReadFn) -> Float32:
            found = [np.arange(width) if i is None else self._orders[i] for i in orders]
            return np.concatenate(found).astype(np.float32)

        return self.vector(("order", orders, width), width * len(orders), make)

    def matrix(self, names: tuple[str, ...], n: tuple[int, ...], k: int, glu: bool) -> int:
        """Return the id of the native matrix [sum(n), k] with the rows of the matrices `names`.

        n: the number of rows of each matrix.
        glu: whether the two matrices are the gate and up projections.
        """
        key = (names, glu)
        if key not in self._matrices:
            kind = self.kind_of(names[0])
            id_ = self.native.matrix("+".join(names), kind, sum(n), k, list(n), glu)
            self._matrices[key] = id_
            values = names[0] in self._unordered
            self.out.matrices.append(MatrixLoad(id_, names, values=values))
        return self._matrices[key]

    def read(self, name: str, n: int, k: int, matrices: int = 1) -> OpWeights:
        """Return the weights that an op reads for one token, and add their bytes to `read_bytes`.

        The op reads `matrices` matrices [n, k] of the same weight kind as `name`.
        """
        kind = self.kind_of(name)
        size = matrices * self.native.packed_bytes(kind, n, k)
        weights = OpWeights(kind, matrices * n, k, size)
        self.out.read_bytes += weights.num_bytes
        return weights

    def vector(
        self,
        key: object,
        count: int,
        make: Callable[[ReadFn], Float32],
    ) -> int:
        """Return the id of a vector of `count` floats from `make`; equal keys share a vector."""
        if key not in self._vectors:
            self._vectors[key] = self.native.vector(str(key)[:80], count)
            self.out.vectors.append(VectorLoad(self._vectors[key], make))
        return self._vectors[key]

    def plain(self, name: str | None, count: int) -> int:
        """Return the id of the native vector with the unchanged weight `name`.

        Returns -1 if `name` is None.
        """
        if name is None:
            return -1
        return self.vector(name, count, lambda read: read(name))

    def norm_weight(
        self, name: Joined | None, count: int, plus_one: bool, scale: float = 1.0
    ) -> int:
        """Return the id of the native vector (weight + 1 if `plus_one`) * scale.

        Returns -1 if `name` is None.
        """
        if name is None or (isinstance(name, str) and not plus_one and scale == 1.0):
            return self.plain(name, count)
        names = (name,) if isinstance(name, str) else name
        more, factor = np.float32(plus_one), np.float32(scale)

        def make(read: ReadFn) -> Float32:
            found: Float32 = (np.concatenate([read(each) for each in names]) + more) * factor
            return found

        return self.vector(("norm", name, plus_one, scale), count, make)

    def bias(self, names: tuple[str | None, ...], features: tuple[int, ...]) -> int:
        """Return the id of the vector of these biases, with zeros for each None.

        Returns -1 if all are None.
        """
        if all(n is None for n in names):
            return -1

        def make(read: ReadFn) -> Float32:
            parts = [
                np.zeros(f, np.float32) if n is None else read(n).reshape(-1)
                for n, f in zip(names, features, strict=True)
            ]
            return np.concatenate(parts)

        return self.vector(("bias", names, features), sum(features), make)

    def rope(self, rope: Rope | None) -> dict[str, Any]:
        """Return the native fields rotary, cos and sin; 0 and -1 if nothing is rotated.

        cos and sin are vectors [max_position, rotary / 2].
        """
        if rope is None or not rope.rotary:
            return {"rotary": 0, "cos": -1, "sin": -1}
        count = self.max_position * (rope.rotary // 2)

        made: dict[int, Float32] = {}

        def table(which: int) -> Float32:
            if which not in made:  # cos and sin are computed from the same angles
                positions = np.arange(self.max_position, dtype=np.int32)
                made.update(enumerate(rope_tables(rope, positions, long=self._long_rope)))
            return made.pop(which)

        cos = self.vector(("cos", rope), count, lambda _: table(0))
        sin = self.vector(("sin", rope), count, lambda _: table(1))
        return {"rotary": rope.rotary, "cos": cos, "sin": sin}
