"""Lower a Program to the native executor: weight kinds, row formats, shared buffers.

The Program defines the computation; lowering chooses how its values are stored. Each weight kind
multiplies rows of one format (`csrc/kernels/table.h: ActFormat`). If all readers of a value are
linears of one format, the op that produces the value stores it in that format. Results of experts
that only Combine reads are bf16, unless their activations were more precise. Other values stay in
fp32 and are converted before each linear. Values with disjoint lifetimes share a buffer.

Some matrices are stored with their columns in another order (activation order of GPTQ). The columns
of the other factor are reordered when it is converted, so before it is quantized.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

import cpuserve._C as _C
from cpuserve.errors import ModelError
from cpuserve.program.adapters import parse as parse_adapter
from cpuserve.program.dataflow import combined_from, last_uses, looked_up, reads, uses, written
from cpuserve.program.loads import (
    Float32,
    HeadPart,
    MatrixLoad,
    OpWeights,
    ReadFn,
    TableLoad,
    VectorLoad,
)
from cpuserve.program.ops import (
    ActivationOp,
    Add,
    Attention,
    Columns,
    Combine,
    Embed,
    ExpertLinear,
    Gate,
    GatedDelta,
    GatedNorm,
    HeadLinear,
    Hidden,
    KeepTop,
    LatentStoreKV,
    LayerNorm,
    Linear,
    Logits,
    Mamba2,
    MatchRms,
    MixParts,
    Op,
    PartNorm,
    PositionEmbed,
    RmsNorm,
    Rope,
    RopeStoreKV,
    Route,
    RouteAdapters,
    Scale,
    ShortConv,
    SplitGates,
    Spread,
    Then,
    ValueId,
)
from cpuserve.program.program import Program, group_of
from cpuserve.program.row_formats import (
    ACT_FORMAT,
    CONVERTED_KIND,
    DOT_OF_KIND,
    KV_ROW_FORMAT,
    REORDERED,
    WHOLE_ROW,
    act_format,
    combined_format,
)
from cpuserve.program.tables import alibi_slopes, rope_tables

Order = npt.NDArray[np.int64]

log = logging.getLogger(__name__)

# Places in a list of orders; None for columns that are in order.
Orders = tuple[int | None, ...]


@dataclass(slots=True)
class Lowered:
    """The result of lowering, from which the native executor is built.

    Native op i implements Program op `source_op[i]` and multiplies the matrix `op_weights[i]`, if
    any. A decode step of one sequence reads `read_bytes` of packed weights (linears and lm_head,
    without the embedding row and adapters; of experts, the chosen ones). `expert_read_bytes` of
    them are of experts, who have `expert_bytes` in matrices of up to `expert_matrix_bytes`. A
    prompt token costs 2 x
    `linear_weights` operations (without lm_head). Vector `adapter_scales` has the scales of the
    adapters (-1 = there are none). `cache_reads` are the cache layer and the window of each
    attention op; ops may share a layer.
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

    def step_bytes(self, sequences: int) -> float:
        """Bytes of packed weights that a decode step of `sequences` reads.

        Those of experts are the expected ones if tokens choose all experts alike.
        """
        return sum(w.read_bytes(sequences) for w in self.op_weights if w is not None)

    def cache_bytes(self, keys: int, token_bytes: Sequence[int]) -> int:
        """Bytes of the KV cache that a token with `keys` keys reads.

        token_bytes: the bytes of a token in each cache layer.
        """
        return sum(token_bytes[layer] * min(keys, w or keys) for layer, w in self.cache_reads)

    @property
    def dot(self) -> str:
        """The dot-product type of most weights, as the probes call it."""
        counts: dict[str, int] = {}
        for weights in filter(None, self.op_weights):
            dot = DOT_OF_KIND.get(weights.kind, "f32")
            counts[dot] = counts.get(dot, 0) + weights.n * weights.k
        return max(counts, key=counts.__getitem__, default="f32")


def split_then(then: Then) -> tuple[str, bool]:
    """(activation, whether it is gated): ("silu", True) for "silu_mul"."""
    return (then.removesuffix("_mul"), then.endswith("_mul"))


def _position_rows(op: PositionEmbed, read: ReadFn) -> Float32:
    """The rows that a PositionEmbed adds by position [rows, width], token type 0 included."""
    rows = np.zeros((op.rows, op.width), np.float32) if op.weight is None else read(op.weight)
    return rows if op.types is None else rows + read(op.types)[:1]


class Lowering:
    """Lowers the ops of a Program in one pass; `run()` returns the Lowered.

    kind_of and order_of: the weight kind and the column order (None: as they are) of a matrix.
    is_mapped: whether the rows of a tensor can be read where its file is mapped.
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
        self._is_mapped = is_mapped
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
        self._width = {v.id: v.width for v in program.values}
        self._copies = {v.id: v.copies for v in program.values}
        self._settle_experts()
        self._uses = uses(program)
        self._last_use = last_uses(program)
        self._format = {v.id: self._choose_format(v.id) for v in program.values}
        self._buffer: dict[ValueId, int] = {}
        self._free: dict[tuple[int, str, int], list[int]] = {}
        self._q: dict[ValueId, tuple[int, tuple[int, str]]] = {}
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
            getattr(self, f"_{type(op).__name__.lower()}")(op)
            self._retire(op)
        return self.out

    # -- values ------------------------------------------------------------------------------

    def _choose_format(self, value: ValueId) -> str:
        if (experts := combined_from(value, self._uses[value])) is not None:
            return combined_format(self._act_format(experts.weights[0][0]))
        wanted: set[str] = set()
        for op in self._uses[value]:
            if isinstance(op, Linear) and op.x == value:
                wanted |= {self._read_format(w) for w in op.weights}
            elif isinstance(op, Logits) and op.x == value:
                wanted.add(self._read_format(op.weight))
            elif isinstance(op, ExpertLinear) and op.x == value:
                wanted |= {self._read_format(names[0]) for names in op.weights}
            elif isinstance(op, HeadLinear) and op.x == value:
                wanted.add(ACT_FORMAT[self._head_kind(op)])
            elif isinstance(op, Spread) and op.x == value:
                wanted.add(self._choose_format(op.out))
            elif value in reads(op):
                return "f32"
            if written(op) == value and not isinstance(
                op,
                RmsNorm
                | LayerNorm
                | Attention
                | Linear
                | ActivationOp
                | Spread
                | ExpertLinear
                | HeadLinear,
            ):
                return "f32"
            if isinstance(op, Linear) and op.out == value and self._splits(op):
                return "f32"
        chosen = wanted.pop() if len(wanted) == 1 else "f32"
        heads = [op for op in self._uses[value] if isinstance(op, HeadLinear) and op.out == value]
        # Each head writes its own columns. Those of bf16 are padded to whole groups.
        if any(chosen.startswith("q8") or op.features % 32 for op in heads):
            return "f32"
        if chosen in WHOLE_ROW and self._in_pieces(value):
            return "f32"
        return "f32" if chosen.startswith("q8g32") and self._heads_cross_groups(value) else chosen

    def _act_format(self, weight: str) -> str:
        """The row format of the activations that `weight` is multiplied with."""
        return act_format(self.kind_of(weight), self.activation_bits)

    def _read_format(self, weight: str) -> str:
        """The storage format for a value that only `weight` is multiplied with."""
        return self._act_format(weight) if self._order(weight) is None else "f32"

    def _heads_cross_groups(self, value: ValueId) -> bool:
        """Whether attention writes `value` in heads that split groups of 32.

        A group can only be quantized as a whole, and attention writes one head at a time.
        """
        return any(
            isinstance(op, Attention) and op.out == value and op.head_dim % 32
            for op in self._uses[value]
        )

    def _in_pieces(self, value: ValueId) -> bool:
        """Whether a linear (strips) or attention (heads) writes `value` in parts of rows."""
        return any(
            isinstance(op, Attention | Linear | ExpertLinear) and op.out == value
            for op in self._uses[value]
        )

    def _splits(self, op: Linear) -> bool:
        """Whether one matrix cannot hold the parts of `op`: their kinds or orders differ."""
        return len({self._layout(w) for w in op.weights}) > 1

    def _take(self, width: int, fmt: str, copies: int = 1) -> int:
        free = self._free.get((width, fmt, copies))
        if free:
            return free.pop()
        return self.native.value(f"{fmt}x{width}", width, fmt, copies)

    def _give(self, buffer: int, width: int, fmt: str, copies: int = 1) -> None:
        self._free.setdefault((width, fmt, copies), []).append(buffer)

    def _value(self, value: ValueId) -> int:
        if value not in self._buffer:
            self._buffer[value] = self._take(
                self._width[value], self._format[value], self._copies[value]
            )
        return self._buffer[value]

    def _as(
        self, value: ValueId, fmt: str, orders: Orders = (), routing: ValueId | None = None
    ) -> int:
        """The buffer that holds `value` in `fmt`; emits a conversion if it is stored otherwise.

        orders: the order of its columns, or one for each expert of `routing`.
        """
        if self._format[value] == fmt and not orders:
            return self._value(value)
        key = (value, fmt, orders)
        if key not in self._converted:
            buffer = self._take(self._width[value], fmt, self._copies[value])
            more = {"order": self._columns_in(orders, self._width[value])} if orders else {}
            if len(orders) > 1 and routing is not None:
                more["routing"] = self._value(routing)
            self._emit(lambda: self.native.convert(self._value(value), buffer, **more))
            self._converted[key] = buffer
        return self._converted[key]

    def _retire(self, op: Op) -> None:
        """Drop conversions of the value that `op` wrote, and free buffers after their last use."""
        out = written(op)
        touched = {v for v in (*reads(op), out) if v is not None}
        for made in list(self._converted):
            of, fmt, _ = made
            if of == out or self._last_use[of] == self._op:
                buffer = self._converted.pop(made)
                self._give(buffer, self._width[of], fmt, self._copies[of])
        for value in touched:
            if self._last_use[value] != self._op:
                continue
            if value in self._buffer:
                self._give(
                    self._buffer.pop(value),
                    self._width[value],
                    self._format[value],
                    self._copies[value],
                )
            if value in self._q:
                buffer, key = self._q.pop(value)
                self._give(buffer, *key)

    def _emit(self, add: Callable[[], None], weights: OpWeights | None = None) -> None:
        add()
        self.out.source_op.append(self._op)
        self.out.op_weights.append(weights)

    # -- weights -----------------------------------------------------------------------------

    def kind_of(self, weight: str) -> str:
        """The weight kind of a matrix."""
        return CONVERTED_KIND if weight in self._unordered else self._stored_kind(weight)

    def _order(self, weight: str) -> int | None:
        """The place in `_orders` of the order of a matrix's columns; None: they are in order."""
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

    def _orders_of(self, weight: str) -> Orders:
        order = self._order(weight)
        return () if order is None else (order,)

    def _layout(self, weight: str) -> tuple[str, int | None]:
        """The key that matrices must share to be packed as one."""
        return self.kind_of(weight), self._order(weight)

    def _settle_experts(self) -> None:
        """Find experts that cannot be one matrix because gate and up have different orders."""
        for op in self.program.ops:
            if not isinstance(op, ExpertLinear):
                continue
            if any(len({self._order(name) for name in names}) > 1 for names in op.weights):
                self._unordered |= {name for names in op.weights for name in names}
        if self._unordered:
            log.info(
                "experts whose gate and up have different activation orders are converted to int8 "
                "in groups of 32 while loading"
            )

    def _expert_orders(self, op: ExpertLinear) -> Orders:
        """The order for each expert, or one if all are the same; empty if there are none."""
        orders = tuple(self._order(names[0]) for names in op.weights)
        some = orders[:1] if len(set(orders)) == 1 else orders
        return () if some == (None,) else some

    def _columns_in(self, orders: Orders, width: int) -> int:
        """The vector of the columns in these orders, one after another."""

        def make(_: ReadFn) -> Float32:
            found = [np.arange(width) if i is None else self._orders[i] for i in orders]
            return np.concatenate(found).astype(np.float32)

        return self._vector(("order", orders, width), width * len(orders), make)

    def _matrix(self, names: tuple[str, ...], n: tuple[int, ...], k: int, glu: bool) -> int:
        key = (names, glu)
        if key not in self._matrices:
            kind = self.kind_of(names[0])
            id_ = self.native.matrix("+".join(names), kind, sum(n), k, list(n), glu)
            self._matrices[key] = id_
            values = names[0] in self._unordered
            self.out.matrices.append(MatrixLoad(id_, names, values=values))
        return self._matrices[key]

    def _read(self, name: str, n: int, k: int, matrices: int = 1) -> OpWeights:
        """The matrices that an op reads for one token; adds their size to the bytes of a step."""
        kind = self.kind_of(name)
        size = matrices * self.native.packed_bytes(kind, n, k)
        weights = OpWeights(kind, matrices * n, k, size)
        self.out.read_bytes += weights.num_bytes
        return weights

    def _vector(
        self,
        key: object,
        count: int,
        make: Callable[[ReadFn], Float32],
    ) -> int:
        if key not in self._vectors:
            self._vectors[key] = self.native.vector(str(key)[:80], count)
            self.out.vectors.append(VectorLoad(self._vectors[key], make))
        return self._vectors[key]

    def _plain(self, name: str | None, count: int) -> int:
        if name is None:
            return -1
        return self._vector(name, count, lambda read: read(name))

    def _bias(self, names: tuple[str | None, ...], features: tuple[int, ...]) -> int:
        if all(n is None for n in names):
            return -1

        def make(read: ReadFn) -> Float32:
            parts = [
                np.zeros(f, np.float32) if n is None else read(n).reshape(-1)
                for n, f in zip(names, features, strict=True)
            ]
            return np.concatenate(parts)

        return self._vector(("bias", names, features), sum(features), make)

    def _rope_tables(self, rope: Rope) -> tuple[int, int]:
        """Vectors cos and sin [max_position, rotary / 2]."""
        count = self.max_position * (rope.rotary // 2)

        made: dict[int, Float32] = {}

        def table(which: int) -> Float32:
            if which not in made:  # compute both tables from the same angles
                positions = np.arange(self.max_position, dtype=np.int32)
                made.update(enumerate(rope_tables(rope, positions, long=self._long_rope)))
            return made.pop(which)

        cos = self._vector(("cos", rope), count, lambda _: table(0))
        return cos, self._vector(("sin", rope), count, lambda _: table(1))

    # -- ops ---------------------------------------------------------------------------------

    def _embed(self, op: Embed) -> None:
        if self._order(op.weight) is not None:
            msg = f"{op.weight} has an activation order (g_idx), which embeddings cannot have"
            raise ModelError(msg)
        if self._gathers(op.weight):
            matrix = self._table(op)
        else:
            matrix = self._matrix((op.weight,), (op.vocab,), op.width, False)
        self._emit(lambda: self.native.embed(self._value(op.out), matrix, op.scale))

    def _gathers(self, weight: str) -> bool:
        """Whether a table stays in its file: nothing multiplies it, as a tied one."""
        return weight in looked_up(self.program) and self._is_mapped(weight)

    def _table(self, op: Embed) -> int:
        found = [table.id for table in self.out.tables if table.name == op.weight]
        if found:
            return found[0]
        id_ = self.native.table(op.weight, self.kind_of(op.weight), op.vocab, op.width)
        self.out.tables.append(TableLoad(id_, op.weight))
        return id_

    def _positionembed(self, op: PositionEmbed) -> None:
        if op.types is None:
            table = self._plain(op.weight, op.rows * op.width)
        else:
            key = ("positions", op.weight, op.types)
            table = self._vector(key, op.rows * op.width, lambda read: _position_rows(op, read))
        self._emit(lambda: self.native.position_embed(self._value(op.x), table, op.rows, op.offset))

    def _rmsnorm(self, op: RmsNorm) -> None:
        weight = self._norm_weight(op.weight, op.width, op.plus_one, op.scale)
        x = self._value(op.x)
        self._emit(lambda: self.native.rms_norm(x, self._value(op.out), weight, op.eps))

    def _partnorm(self, op: PartNorm) -> None:
        x, width, weight = self._value(op.x), op.width, self._plain(op.weight, op.width)
        if op.weight is None:
            weight = self._vector(("ones", width), width, lambda _: np.ones(width, np.float32))
        self._emit(lambda: self.native.part_norm(x, weight, op.column, op.parts, op.eps))

    def _norm_weight(self, name: str | None, count: int, plus_one: bool, scale: float = 1.0) -> int:
        if name is None or (not plus_one and scale == 1.0):
            return self._plain(name, count)
        more, factor = np.float32(plus_one), np.float32(scale)
        key = ("norm", name, plus_one, scale)
        return self._vector(key, count, lambda read: (read(name) + more) * factor)

    def _layernorm(self, op: LayerNorm) -> None:
        weight, bias = self._plain(op.weight, op.width), self._plain(op.bias, op.width)
        x = self._value(op.x)
        self._emit(lambda: self.native.layer_norm(x, self._value(op.out), weight, bias, op.eps))

    def _linear(self, op: Linear) -> None:
        if not self._splits(op):
            self._linear_part(op, op.weights, op.biases, op.features, self._value(op.out), 0)
            return
        activation, glu = split_then(op.then)
        if not glu:
            self._linear_each(op, self._value(op.out), op.then)
            return
        # gate and up of different layouts cannot share a matrix: compute both, then act(gate) * up.
        width = sum(op.features)
        both = self._take(width, "f32")
        self._linear_each(op, both, "none")
        self._emit(lambda: self.native.activation(both, self._value(op.out), activation, True))
        self._give(both, width, "f32")

    def _linear_each(self, op: Linear, out: int, then: Then) -> None:
        """Emit one linear for each run of parts of equal layout; it writes its columns of `out`."""
        start = column = 0
        layouts = [self._layout(w) for w in op.weights]
        for end in range(1, len(layouts) + 1):
            if end < len(layouts) and layouts[end] == layouts[start]:
                continue
            part = slice(start, end)
            weights, features = op.weights[part], op.features[part]
            self._linear_part(op, weights, op.biases[part], features, out, column, then)
            start, column = end, column + sum(features)

    def _linear_part(
        self,
        op: Linear,
        weights: tuple[str, ...],
        biases: tuple[str | None, ...],
        features: tuple[int, ...],
        out: int,
        column: int,
        then: Then | None = None,
    ) -> None:
        activation, glu = split_then(op.then if then is None else then)
        matrix = self._matrix(weights, features, op.in_features, glu)
        x = self._as(op.x, self._act_format(weights[0]), self._orders_of(weights[0]))
        bias = self._bias(biases, features)
        read = self._read(weights[0], sum(features), op.in_features)
        self.out.linear_weights += read.n * read.k
        self._emit(
            lambda: self.native.linear(x, out, matrix, bias, activation, glu, op.add, column), read
        )

    def _route(self, op: Route) -> None:
        bias, factors = (self._plain(name, op.experts) for name in (op.bias, op.factors))
        x, out, g = self._value(op.x), self._value(op.out), op.groups
        groups = (g.count, g.kept, g.best) if g else ()
        more = {} if op.factors is None else {"factors": factors}
        count, chosen, score, scale = op.experts, op.chosen, op.score, op.scale
        add = self.native.route
        self._emit(
            lambda: add(x, out, count, chosen, score, op.renormalize, scale, bias, *groups, **more)
        )

    def _routeadapters(self, op: RouteAdapters) -> None:
        scales = self.out.adapter_scales = self._plain(op.scales, op.adapters)
        self._emit(lambda: self.native.adapter(self._value(op.out), op.adapters, scales))

    def _spread(self, op: Spread) -> None:
        x = self._as(op.x, self._format[op.out])
        self._emit(lambda: self.native.spread(x, self._value(op.routing), self._value(op.out)))

    def _expertlinear(self, op: ExpertLinear) -> None:
        activation, glu = split_then(op.then)
        kinds = {self.kind_of(w) for names in op.weights for w in names}
        if len(kinds) > 1:
            msg = (
                f"the experts of {op.weights[0][0]} have matrices of the kinds "
                f"{', '.join(sorted(kinds))}; those of one layer must have one kind"
            )
            raise ModelError(msg)
        matrices = [self._matrix(names, op.features, op.in_features, glu) for names in op.weights]
        biases = [self._bias(names, op.features) for names in op.biases]
        orders = self._expert_orders(op)
        x = self._as(op.x, self._act_format(op.weights[0][0]), orders, op.routing)
        read = None
        if parse_adapter(op.weights[0][0]) is None:  # a token without adapter reads none
            read = self._read(op.weights[0][0], sum(op.features), op.in_features, op.chosen)
            self.out.linear_weights += read.n * read.k
            one = read.num_bytes // op.chosen
            read = replace(read, expert_bytes=one * len(op.weights))
            self.out.expert_read_bytes += read.num_bytes
            self.out.expert_bytes += read.expert_bytes
            self.out.expert_matrix_bytes = max(one, self.out.expert_matrix_bytes)
        routing, out = self._value(op.routing), self._value(op.out)
        self._emit(
            lambda: self.native.expert_linear(x, routing, out, matrices, biases, activation, glu),
            read,
        )

    def _head_kind(self, op: HeadLinear) -> str:
        """The kind of its matrices: columns of quantized rows cannot be multiplied alone."""
        kind = self.kind_of(op.weight)
        return kind if kind.startswith("dense") else "dense_bf16"

    def _headlinear(self, op: HeadLinear) -> None:
        kind, n, k = self._head_kind(op), op.features, op.in_features
        matrices = []
        for h in range(op.heads):
            begin = h * op.rows + op.first
            part = HeadPart(slice(begin, begin + (k if op.transposed else n)), op.transposed)
            name = f"{op.weight} {part.rows.start}"
            matrices.append(self.native.matrix(name, kind, n, k, [n], False))
            self.out.matrices.append(MatrixLoad(matrices[-1], (op.weight,), part))
        x, out = self._as(op.x, ACT_FORMAT[kind]), self._value(op.out)
        size = op.heads * self.native.packed_bytes(kind, n, k)
        read = OpWeights(kind, op.heads * n, k, size)
        self.out.read_bytes += read.num_bytes
        self.out.linear_weights += read.n * read.k
        self._emit(lambda: self.native.head_linear(x, out, matrices, op.step), read)

    def _latentstorekv(self, op: LatentStoreKV) -> None:
        q = self._take_queries(op.out, op.q_heads, op.head_dim)
        cos, sin = self._rope_tables(op.rope)
        norm = self._plain(op.norm, op.rank)
        values = self._value(op.q), self._value(op.latent), self._value(op.kv)
        sizes = (op.layer, op.q_heads, op.nope, op.rank, op.rope.rotary)
        self._emit(
            lambda: self.native.latent_store_kv(
                *values, q, *sizes, cos, sin, norm, op.eps, op.interleaved
            )
        )

    def _take_queries(self, value: ValueId, heads: int, head_dim: int) -> int:
        """The buffer of the queries that attention reads by the name of `value`."""
        key = (heads * (-(-head_dim // 16) * 16), KV_ROW_FORMAT[self.kv_type])
        q = self._take(*key)
        self._q[value] = (q, key)
        return q

    def _combine(self, op: Combine) -> None:
        x, routing, out = self._value(op.x), self._value(op.routing), self._value(op.out)
        more = {} if op.add else {"add": False}
        self._emit(lambda: self.native.combine(x, routing, out, **more))

    def _ropestorekv(self, op: RopeStoreKV) -> None:
        q = self._take_queries(op.qkv, op.q_heads, op.head_dim)
        cos, sin = self._rope_tables(op.rope) if op.rope else (-1, -1)
        rotary = op.rope.rotary if op.rope else 0
        q_norm = self._norm_weight(op.q_norm, op.head_dim, op.plus_one)
        k_norm = self._norm_weight(op.k_norm, op.head_dim, op.plus_one)
        more = {} if op.stores else {"stores": False}
        self._emit(
            lambda: self.native.rope_store_kv(
                self._value(op.qkv),
                q,
                op.layer,
                op.q_heads,
                rotary,
                cos,
                sin,
                q_norm,
                k_norm,
                op.eps,
                **more,
            )
        )

    def _attention(self, op: Attention) -> None:
        self.out.cache_reads.append((op.layer, op.window))
        slopes = -1
        if op.alibi:
            slopes = self._vector(
                ("alibi", op.q_heads), op.q_heads, lambda _: alibi_slopes(op.q_heads)
            )
        sinks = self._plain(op.sinks, op.q_heads)
        q, _ = self._q[op.qkv]
        more = {} if op.causal else {"causal": False}
        self._emit(
            lambda: self.native.attention(
                q,
                self._value(op.out),
                op.layer,
                op.q_heads,
                op.scale,
                op.window,
                op.softcap,
                slopes,
                sinks,
                **more,
            )
        )

    def _splitgates(self, op: SplitGates) -> None:
        x, out = self._value(op.x), self._value(op.out)
        self._emit(lambda: self.native.split_gates(x, out, op.heads, op.head_dim))

    def _gate(self, op: Gate) -> None:
        x, out = self._value(op.x), self._value(op.out)
        self._emit(lambda: self.native.gate(x, out, op.column, op.single, op.plain))

    def _gateddelta(self, op: GatedDelta) -> None:
        heads, width = op.key_heads, op.key_width
        values = op.value_heads * op.value_width
        channels = 2 * heads * width + values

        def conv(read: ReadFn) -> Float32:
            """[channels, 1, taps] as [key heads, taps, the channels of a key head]."""
            weight = read(op.conv).reshape(channels, op.taps)
            q, k, v = np.split(weight, [heads * width, 2 * heads * width])
            if op.tiled:
                v = v.reshape(-1, heads, op.value_width, op.taps).swapaxes(0, 1)
            parts = [p.reshape(heads, -1, op.taps) for p in (q, k, v)]
            return np.concatenate(parts, axis=1).transpose(0, 2, 1)

        vectors = (
            self._vector(("conv", op.conv), channels * op.taps, conv),
            self._vector(("rates", op.a_log), op.value_heads, lambda read: -np.exp(read(op.a_log))),
            self._plain(op.dt_bias, op.value_heads),
            self._plain(op.norm, op.value_width),
        )
        x, gates, out = self._value(op.x), self._value(op.gates), self._value(op.out)
        sizes = (heads, op.value_heads, width, op.value_width, op.taps)
        native = self.native.gated_delta
        self._emit(lambda: native(x, gates, out, *sizes, *vectors, op.eps, op.tiled))

    def _shortconv(self, op: ShortConv) -> None:
        def by_tap(read: ReadFn) -> Float32:
            return read(op.weight).reshape(op.channels, op.taps).T

        weight = self._vector(("conv", op.weight), op.channels * op.taps, by_tap)
        bias = self._plain(op.bias, op.channels)
        x, out = self._value(op.x), self._value(op.out)
        sizes = (op.column, op.units, op.taps)
        self._emit(lambda: self.native.short_conv(x, out, *sizes, weight, bias, op.silu))

    def _mamba2(self, op: Mamba2) -> None:
        vectors = (
            self._vector(("rates", op.a_log), op.heads, lambda read: -np.exp(read(op.a_log))),
            self._plain(op.dt_bias, op.heads),
            self._plain(op.d, op.heads),
        )
        x, steps, out = self._value(op.x), self._value(op.steps), self._value(op.out)
        widths = (op.key_width, op.value_width, op.together, op.column)
        sizes = (op.heads, op.groups, *widths)
        self._emit(lambda: self.native.mamba2(x, steps, out, *sizes, *vectors, op.low, op.high))

    def _gatednorm(self, op: GatedNorm) -> None:
        x, z, out = self._value(op.x), self._value(op.z), self._value(op.out)
        weight = self._plain(op.weight, op.width)
        self._emit(lambda: self.native.gated_norm(x, z, out, weight, op.groups, op.column, op.eps))

    def _add(self, op: Add) -> None:
        more = {"column": op.column} if op.column else {}
        self._emit(lambda: self.native.add(self._value(op.x), self._value(op.out), **more))

    def _scale(self, op: Scale) -> None:
        x, factor = self._value(op.x), self._plain(op.weight, op.width if op.by_column else 1)
        self._emit(lambda: self.native.scale(x, factor))

    def _columns(self, op: Columns) -> None:
        x, more = self._value(op.x), -1 if op.more is None else self._value(op.more)
        self._emit(lambda: self.native.columns(x, more, self._value(op.out), op.column))

    def _mixparts(self, op: MixParts) -> None:
        x, gates = self._value(op.x), self._value(op.gates)
        target = -1 if op.target is None else self._value(op.target)
        rows = op.parts * op.parts if op.target is None else op.parts
        weight = self._plain(op.weight, rows * op.gate_width)
        numbers = (op.parts, op.active, op.scale)
        self._emit(lambda: self.native.mix_parts(x, gates, target, weight, *numbers))

    def _matchrms(self, op: MatchRms) -> None:
        x, like = self._value(op.x), self._value(op.like)
        self._emit(lambda: self.native.match_rms(x, like, op.floor))

    def _keeptop(self, op: KeepTop) -> None:
        x = self._value(op.x)
        self._emit(lambda: self.native.keep_top(x, op.width, op.deviations))

    def _activationop(self, op: ActivationOp) -> None:
        activation, glu = split_then(op.then)
        x = self._value(op.x)
        self._emit(lambda: self.native.activation(x, self._value(op.out), activation, glu))

    def _logits(self, op: Logits) -> None:
        matrix = self._matrix((op.weight,), (op.vocab,), op.width, False)
        x = self._as(op.x, self._act_format(op.weight), self._orders_of(op.weight))
        bias = self._plain(op.bias, op.vocab)
        read = self._read(op.weight, op.vocab, op.width)
        self._emit(lambda: self.native.logits(x, matrix, bias, op.scale, op.softcap), read)

    def _hidden(self, op: Hidden) -> None:
        self._emit(lambda: self.native.hidden(self._value(op.x)))
