"""Operations on routed rows: experts of a mixture, and LoRA adapters, which a request selects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cpuserve.base.errors import ModelError
from cpuserve.program.base_builder import join, then_width
from cpuserve.program.loads import Orders
from cpuserve.program.lora import SCALES, Adapters, name_a, name_b
from cpuserve.program.lora import parse as parse_adapter
from cpuserve.program.operations.hadamard import HadamardBuilder
from cpuserve.program.ops import Op, Then, ValueId, split_then
from cpuserve.program.program import Use
from cpuserve.program.row_formats import WHOLE_ROW, combined_format

if TYPE_CHECKING:
    from torch import Tensor

    from cpuserve.program.interpret import Interpreter
    from cpuserve.program.lower import Lowering


class RouteAdapters(Op, frozen=True):
    """Route each token to the LoRA adapter of its sequence, as if the adapter were its only expert.

    out [T, 2]: for each token the number of its adapter, then the scale of the adapter.
    The number is -1 for a token without an adapter, which has no routed row.
    The scale is `scales`[number] (a weight [adapters]) times the scale of the sequence.
    """

    reads_of = ()

    out: ValueId
    adapters: int
    scales: str

    def lower(self, to: Lowering) -> None:
        to.out.adapter_scales = to.plain(self.scales, self.adapters)
        to.add(self, "adapter", scales=to.out.adapter_scales)

    def reference(self, at: Interpreter) -> Tensor:
        import torch

        adapters = torch.from_numpy(at.step.token_adapters()).long()
        scales = at.vector(self.scales)[adapters.clamp(min=0)]
        scales = scales * torch.from_numpy(at.step.token_adapter_scales())
        return torch.stack([adapters.float(), scales], dim=1)


class Dispatch(Op, frozen=True):
    """Copy the row of each token to each of its experts: out [T * chosen, width], routed rows.

    Routed rows are sorted by expert, then token.

    routing: the output of Route or RouteAdapters.
    """

    reads_of = ("x", "routing")

    x: ValueId
    routing: ValueId
    out: ValueId
    width: int
    chosen: int

    def lower(self, to: Lowering) -> None:
        to.add(self, x=to.stored_as(self.x, to.formats[self.out]))

    def read_formats(self, value: ValueId, to: Lowering) -> set[str]:
        """Return the row format of the routed rows for x, and f32 for the routing."""
        return {to.choose_format(self.out)} if value == self.x else {"f32"}

    def can_write(self, rows: str, to: Lowering) -> bool:
        """Return True: the kernel can write rows of any format."""
        return True

    def reference(self, at: Interpreter, x: Tensor, routing: Tensor) -> Tensor:
        return x[routed_rows(routing, self.chosen) // self.chosen]


class ExpertLinear(Op, frozen=True):
    """A Linear of routed rows: each row is multiplied by the matrices of its own expert.

    weights[e] are the matrices of expert e, and biases[e] its biases, by name as in Linear.
    `biases` is empty if no expert has a bias.
    """

    reads_of = ("x", "routing")
    claimed = True

    x: ValueId
    routing: ValueId
    out: ValueId
    weights: tuple[tuple[str, ...], ...]
    features: tuple[int, ...]
    in_features: int
    chosen: int
    then: Then = "none"
    biases: tuple[tuple[str, ...], ...] = ()

    def lower(self, to: Lowering) -> None:
        activation, glu = split_then(self.then)
        kinds = {to.kind_of(w) for names in self.weights for w in names}
        if len(kinds) > 1:
            msg = (
                f"the experts of {self.weights[0][0]} have matrices of the kinds "
                f"{', '.join(sorted(kinds))}; those of one layer must have one kind"
            )
            raise ModelError(msg)
        matrices = [
            to.matrix(names, self.features, self.in_features, glu) for names in self.weights
        ]
        biases = [to.bias(names, self.features) for names in self.biases]
        orders = self._orders(to)
        x = to.stored_as(self.x, to.act_format(self.weights[0][0]), orders, self.routing)
        read = None
        if parse_adapter(self.weights[0][0]) is None:  # read_bytes does not include adapters
            read = to.read(self.weights[0][0], sum(self.features), self.in_features, self.chosen)
            to.out.linear_weights += read.n * read.k
            one = read.num_bytes // self.chosen
            read = replace(read, expert_bytes=one * len(self.weights))
            to.out.expert_read_bytes += read.num_bytes
            to.out.expert_bytes += read.expert_bytes
            to.out.expert_matrix_bytes = max(one, to.out.expert_matrix_bytes)
        to.add(
            self,
            read=read,
            x=x,
            matrices=matrices,
            biases=biases,
            activation=activation,
            glu=glu,
        )

    def _orders(self, to: Lowering) -> Orders:
        """Return the column order of each expert, or one for all; () if none is reordered."""
        orders = tuple(to.order(names[0]) for names in self.weights)
        some = orders[:1] if len(set(orders)) == 1 else orders
        return () if some == (None,) else some

    def read_formats(self, value: ValueId, to: Lowering) -> set[str]:
        """Return the row formats that the matrices need for x, and f32 for the routing."""
        return {to.read_format(names[0]) for names in self.weights} if value == self.x else {"f32"}

    def can_write(self, rows: str, to: Lowering) -> bool:
        """Return whether kernels, which write strips of columns, can write row format `rows`."""
        return rows not in WHOLE_ROW

    def own_format(self, to: Lowering) -> str | None:
        """Return the row format of the result if only Combine reads it, else None."""
        if combined_from(self.out, to.uses[self.out]) is None:
            return None
        return combined_format(to.act_format(self.weights[0][0]))

    def packed_together(self) -> tuple[tuple[str, ...], ...]:
        """Return the matrices of each expert, by name."""
        return self.weights

    def reference(self, at: Interpreter, x: Tensor, routing: Tensor) -> Tensor:
        import torch

        from cpuserve.program.reference.rows import activate

        experts = routing[:, : self.chosen].reshape(-1).long().sort().values
        experts = experts[experts >= 0]
        width = self.features[0] if self.then.endswith("_mul") else sum(self.features)
        out = torch.empty(len(x), width)
        for expert in sorted(set(experts.tolist())):
            rows = experts == expert
            y = torch.cat([at.multiply(x[rows], w) for w in self.weights[expert]], dim=1)
            if self.biases:
                y = y + torch.cat([at.vector(b) for b in self.biases[expert]])
            out[rows] = activate(y, self.then)
        return out


class WeighRows(Op, frozen=True):
    """Multiply each routed row of x, in place, by the weight of its expert."""

    reads_of = ("routing", "x")
    write_of = "x"

    x: ValueId
    routing: ValueId
    chosen: int

    def reference(self, at: Interpreter, routing: Tensor, x: Tensor) -> Tensor:
        weights = routing[:, self.chosen :].reshape(-1)
        return x * weights[routed_rows(routing, self.chosen), None]


class AddIdentities(Op, frozen=True):
    """Add x, times the weights of the identities that a token has chosen (`Route`), to `out`."""

    reads_of = ("x", "routing", "out")

    x: ValueId
    routing: ValueId
    out: ValueId
    chosen: int

    def reference(self, at: Interpreter, x: Tensor, routing: Tensor, out: Tensor) -> Tensor:
        ids, weights = routing[:, : self.chosen], routing[:, self.chosen :]
        return out + x * (weights * (ids < 0)).sum(dim=1)[:, None]


class Combine(Op, frozen=True):
    """out[t] = the sum of the routed rows of token t, each times the weight of its expert.

    With `add`, the sum is added to the previous value of out[t].
    weighted: False = the rows are added as they are, because `WeighRows` has weighed them.

    Each product is rounded before it is added. The products are added to `out`
    (or to 0) one after another, in the order that the experts were chosen.
    """

    x: ValueId
    routing: ValueId
    out: ValueId
    width: int
    chosen: int
    add: bool = True
    weighted: bool = True

    def reads(self) -> tuple[ValueId, ...]:
        """Return x, the routing and, with `add`, the value that the sum is added to."""
        return (self.x, self.routing, self.out) if self.add else (self.x, self.routing)

    def reference(
        self, at: Interpreter, x: Tensor, routing: Tensor, out: Tensor | None = None
    ) -> Tensor:
        import torch

        order = routed_rows(routing, self.chosen)
        place = torch.full((len(routing) * self.chosen,), -1)
        place[order] = torch.arange(len(order))
        out = torch.zeros(len(routing), self.width) if out is None else out.clone()
        for rank, rows in enumerate(place.reshape(-1, self.chosen).T):
            has = rows >= 0
            weights = routing[has, self.chosen + rank, None] if self.weighted else 1.0
            out[has] += weights * x[rows[has]]
        return out


class ExpertsBuilder(HadamardBuilder):
    """Appends linears of routed rows, and the LoRA matrices of linears and tables."""

    def _add_adapters(
        self, x: ValueId, modules: tuple[str, ...], sizes: Sequence[int], to: ValueId
    ) -> None:
        """Add scale * B A x to `to`, the outputs of `modules`; A and B are of the row's adapter."""
        routing, adapters = self._routed_adapters()
        label, width = join(modules), self._width(x)
        ranks = (adapters.rank,) * len(modules)
        a = tuple(
            tuple(self._need(name_a(m, i), (adapters.rank, width), "matrix") for m in modules)
            for i in range(adapters.count)
        )
        rows = self._value(f"{label} adapted rows", width)
        self._ops.append(Dispatch(x, routing, rows, width, 1))
        low = self._value(f"{label} low rank", sum(ranks))
        self._ops.append(ExpertLinear(rows, routing, low, a, ranks, width, 1))
        self._add_from_low_rank(low, modules, sum(sizes), to)

    def _add_adapters_of_table(self, found: ValueId, module: str, to: ValueId) -> None:
        """Add scale * B a to `to`; each row has the a and B of its adapter (see lora.py).

        found: rows of the common table, which have the columns a of every adapter.
        """
        width = self._width(found)
        low = self._value(f"{module} low rank", width)
        self._ops.append(Dispatch(found, self._routed_adapters()[0], low, width, 1))
        self._add_from_low_rank(low, (module,), self._width(to), to)

    def _add_from_low_rank(
        self, low: ValueId, modules: tuple[str, ...], total: int, to: ValueId
    ) -> None:
        """Multiply the routed rows `low` by matrix B of `modules`, and add the products to `to`."""
        routing, adapters = self._routed_adapters()
        width = self._width(low)
        b = tuple(
            (self._need(name_b(modules, i), (total, width), "matrix"),)
            for i in range(adapters.count)
        )
        out = self._value(f"{join(modules)} adapters", total)
        self._ops.append(ExpertLinear(low, routing, out, b, (total,), width, 1))
        self._ops.append(Combine(out, routing, to, total, 1))

    def _routed_adapters(self) -> tuple[ValueId, Adapters]:
        """Return the value with the adapter of each token (RouteAdapters), and the adapters."""
        if self._adapted is None or self._adapters is None:
            msg = "adapters are routed by embed(), which must come first"
            raise ModelError(msg)
        return self._adapted, self._adapters

    def _expert_linear(
        self,
        x: ValueId,
        routing: ValueId,
        out: ValueId,
        experts: Sequence[Sequence[str]],
        features: int,
        then: Then,
        biased: bool,
        use: Use = "linear",
    ) -> None:
        """Multiply the routed rows x by the matrices [features, width of x] of their experts."""
        k, sizes = self._width(x), (features,) * len(experts[0])
        then_width(join(tuple(experts[0])), sizes, then)
        weights = tuple(
            tuple(self._matrix(n, features, k, use=use) for n in names) for names in experts
        )
        biases = tuple(
            tuple(self._need(f"{n}.bias", (features,), "vector") for n in names)
            for names in (experts if biased else ())
        )
        chosen = self._values[x].copies
        self._ops.append(ExpertLinear(x, routing, out, weights, sizes, k, chosen, then, biases))

    def _route_adapters(self) -> None:
        """Route each token to the adapter of its sequence, unless an earlier op does so."""
        if self._adapters is None or self._adapted is not None:
            return
        self._adapted, count = self._value("adapters", 2), self._adapters.count
        scales = self._need(SCALES, (count,), "vector")
        self._ops.append(RouteAdapters(self._adapted, count, scales))


def routed_rows(routing: Tensor, chosen: int) -> Tensor:
    """Return token * chosen + rank for each routed row, sorted by expert, then token.

    Expert -1 has no routed row.

    rank: the position of the expert in the list of the token's `chosen` experts.
    """
    sorted_ids = routing[:, :chosen].reshape(-1).sort(stable=True)
    return sorted_ids.indices[sorted_ids.values >= 0]


def combined_from(value: ValueId, ops: Iterable[Op]) -> ExpertLinear | None:
    """Return the ExpertLinear that writes `value`; None if ops other than Combine read the value.

    ops: all ops that read or write the value.
    """
    by = None
    for op in ops:
        if isinstance(op, ExpertLinear) and op.out == value:
            by = op
        elif value in op.reads() and not (isinstance(op, Combine) and op.x == value):
            return None
    return by
