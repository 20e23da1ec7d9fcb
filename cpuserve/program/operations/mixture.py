"""The choice of experts, and mixtures of experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import msgspec

from cpuserve.base.errors import ModelError
from cpuserve.program.operations.columns import Limit
from cpuserve.program.operations.dense import DenseBuilder, Linear
from cpuserve.program.operations.experts import AddIdentities, Combine, Dispatch, WeighRows
from cpuserve.program.operations.norms import LayerNorm, RmsNorm
from cpuserve.program.ops import Op, RouterScore, Then, ValueId
from cpuserve.program.program import Program, Value

if TYPE_CHECKING:
    from torch import Tensor

    from cpuserve.program.interpret import Interpreter
    from cpuserve.program.lower import Lowering


class Groups(msgspec.Struct, frozen=True):
    """Experts in `count` equal groups; a token uses only experts of its `kept` best groups.

    The score of a group is the sum of the `best` (1 or 2) highest scores of its experts.
    """

    count: int
    kept: int
    best: int

    def keep(self, scores: Tensor) -> Tensor:
        """Return scores [T, experts], with -inf for experts outside of a token's best groups."""
        import torch

        by_group = scores.reshape(len(scores), self.count, -1)
        totals = by_group.topk(self.best, dim=2).values.sum(dim=2)
        best = torch.sort(totals, dim=1, descending=True, stable=True).indices[:, : self.kept]
        kept = torch.zeros_like(totals, dtype=torch.bool).scatter_(1, best, True)
        return by_group.masked_fill(~kept[..., None], -torch.inf).reshape(scores.shape)


class Route(Op, frozen=True):
    """Choose experts for every token from its router logits x [T, experts].

    out [T, 2 * chosen]: the ids of the `chosen` best experts,
    the best first (of equal experts the lower id first), then their weights in the same order.

    Choice: the best experts have the highest logits if there is no bias,
    or with the score "sigmoid" the highest sigmoids.
    A bias [experts] is added to the sigmoid ("sigmoid", DeepSeek), to the softmax of all logits
    ("softmax", ERNIE) or to the logit ("chosen_softmax", "chosen_sigmoid" of Kolibri); the highest
    sums are chosen.
    groups: only experts of the best groups of a token are chosen (see Groups).

    Weights, always without the bias: the sigmoid ("sigmoid", "chosen_sigmoid"), the softmax of all
    logits ("softmax") or the softmax over the chosen experts ("chosen_softmax"). With
    "near_softmax" (Phi-3.5 MoE) it is a softmax over the experts that are not chosen before this
    one and have logits near it: (own - logit) / max(own, |logit|) is at most `near`.

    renormalize: whether the weights of a token are divided by their sum.
    scale, factors: after this division, the weights are multiplied by the number `scale`
      and by the vector `factors` [experts].
    identities: how many of the experts, the last ones, return their input (`AddIdentities`). Their
      ids become -1, because they have no routed rows.
    table: a weight [ids, chosen] with the experts of each token id, if the scores do not choose.
    """

    x: ValueId
    out: ValueId
    experts: int
    chosen: int
    score: RouterScore = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    bias: str | None = None
    groups: Groups | None = None
    factors: str | None = None
    near: float = 0.0
    identities: int = 0
    table: str | None = None
    ids: int = 0

    def lower(self, to: Lowering) -> None:
        bias, factors = (to.plain(name, self.experts) for name in (self.bias, self.factors))
        g = self.groups
        groups: dict[str, Any] = {"groups": g.count, "kept": g.kept, "best": g.best} if g else {}
        table, name = -1, self.table
        if name is not None:
            count = self.ids * self.chosen
            table = to.vector(
                ("experts of ids", name), count, lambda read: self.experts_of_ids(read(name))
            )
        to.add(self, bias=bias, factors=factors, table=table, **groups)

    def experts_of_ids(self, ids: Any) -> Any:
        """Return `ids`, the table of experts; ModelError if it has others than the experts."""
        if not ((ids >= 0) & (ids < self.experts)).all():
            msg = f"{self.table} has experts that are not from 0 to {self.experts - 1}"
            raise ModelError(msg)
        return ids

    def reference(self, at: Interpreter, x: Tensor) -> Tensor:
        import torch

        scores = torch.sigmoid(x) if self.score == "sigmoid" else x
        if self.score == "sqrt_softplus":
            scores = torch.nn.functional.softplus(x).sqrt()
        if self.score == "softmax":
            scores = torch.softmax(x, dim=1)
        wanted = x if self.score == "softmax" and self.bias is None else scores
        if self.bias is not None:
            wanted = wanted + at.vector(self.bias)
        if self.groups is not None:
            wanted = self.groups.keep(wanted)
        ids = torch.sort(wanted, dim=1, descending=True, stable=True).indices[:, : self.chosen]
        if self.table is not None:
            ids = at.vector(self.table)[torch.from_numpy(at.step.token_ids).long()].long()
        weights = scores.gather(1, ids)
        if self.score == "chosen_softmax":
            weights = torch.softmax(weights, dim=1)
        if self.score == "chosen_sigmoid":
            weights = torch.sigmoid(weights)
        if self.score == "near_softmax":
            weights = self._near(x, ids)
        if self.renormalize:
            weights = weights / weights.sum(dim=1, keepdim=True)
        weights = weights * self.scale
        if self.factors is not None:
            weights = weights * at.vector(self.factors)[ids]
        ids = ids.masked_fill(ids >= self.experts - self.identities, -1)
        return torch.cat([ids.float(), weights], dim=1)

    def _near(self, x: Tensor, ids: Tensor) -> Tensor:
        """Return the weights of the chosen experts `ids` by "near_softmax"."""
        import torch

        left, weights = x.clone(), []
        for own in ids.T[..., None]:
            top = x.gather(1, own)
            far = (top - x) / torch.maximum(x.abs(), top) > self.near
            weights.append(left.masked_fill(far, -torch.inf).softmax(dim=1).gather(1, own))
            left.scatter_(1, own, -torch.inf)
        return torch.cat(weights, dim=1)


class Guess(Op, frozen=True):
    """Guess the experts of the next Route: out [T, experts] = `router` applied to x.

    x is what this router would read if the layers between were left out. The native executor
    reads the best experts early, if they are in a pool; no other op reads the result.
    `with_guesses` puts an op before this one that computes x and nothing else.
    """

    claimed = True

    x: ValueId
    out: ValueId
    router: str
    bias: str | None = None

    def lower(self, to: Lowering) -> None:
        x = to.stored_as(self.x, to.act_format(self.router), to.orders_of(self.router))
        to.add(self, x=x, before=to.lowered_since(1))  # it finds the router and its bias itself

    def read_formats(self, value: ValueId, to: Lowering) -> set[str]:
        """Return the row format that the router multiplies."""
        return {to.read_format(self.router)}

    def reference(self, at: Interpreter, x: Tensor) -> Tensor:
        y = at.multiply(x, self.router)
        return y if self.bias is None else y + at.vector(self.bias)


def with_guesses(program: Program) -> Program:
    """Return the program with a Guess after each Route but the last, where one can be made.

    The router of the next layer must be one Linear, and read a norm of the residual stream.
    All other values are the same: only the pool of experts of a native executor uses guesses.
    """
    ops, values = list(program.ops), list(program.values)
    route_indexes = [i for i, op in enumerate(ops) if isinstance(op, Route)]
    for route_index, next_index in reversed(list(pairwise(route_indexes))):
        norm_and_linear = _router_of(program, route_index, next_index)
        if norm_and_linear is None:
            continue
        norm, linear = norm_and_linear
        width = next(v.width for v in values if v.id == norm.out)
        x, out = (ValueId(max(v.id for v in values) + n) for n in (1, 2))
        values += [
            Value(x, f"{linear.weights[0]} early", width),
            Value(out, f"{linear.weights[0]} guess", sum(linear.features)),
        ]
        early = msgspec.structs.replace(norm, out=x)
        guess = Guess(x, out, linear.weights[0], linear.biases[0])
        ops[route_index + 1 : route_index + 1] = [early, guess]
    return replace(program, ops=tuple(ops), values=tuple(values))


def _router_of(
    program: Program, route_index: int, next_index: int
) -> tuple[RmsNorm | LayerNorm, Linear] | None:
    """Return the norm and the linear before the Route op `next_index`; None if they are others.

    route_index: that of the Route before, after which the norm must be able to run.
    """

    def writer(value: ValueId) -> Op | None:
        between = program.ops[route_index + 1 : next_index]
        return next((op for op in reversed(between) if op.written() == value), None)

    route = program.ops[next_index]
    if isinstance(route, Route) and route.table is not None:
        return None  # the router does not choose
    (logits,) = route.reads()
    linear = writer(logits)
    if not isinstance(linear, Linear) or linear.add or len(linear.weights) != 1:
        return None
    norm = writer(linear.x)
    if not isinstance(norm, RmsNorm | LayerNorm):
        return None
    known = any(op.written() == norm.x for op in program.ops[:route_index])
    return (norm, linear) if known else None


class MixtureBuilder(DenseBuilder):
    """Appends mixtures of experts."""

    def mixture(
        self,
        h: ValueId,
        router: str,
        experts: Sequence[Sequence[str]],
        *,
        features: int,
        chosen: int,
        to: ValueId | None,
        then: Then = "silu_mul",
        score: RouterScore = "softmax",
        renormalize: bool = False,
        scale: float = 1.0,
        bias: str | None = None,
        groups: Groups | None = None,
        biased: bool = False,
        routed_by: ValueId | None = None,
        factors: str | None = None,
        limit: float = 0.0,
        near: float = 0.0,
        identities: int = 0,
        weigh_inputs: bool = False,
        gate_limit: float = 0.0,
        table: str | None = None,
    ) -> ValueId:
        """Add a mixture of experts of h to the value `to`, and return `to` (None: a new value).

        router: the name of the matrix [experts, columns] that multiplies `routed_by` (None: h).
        experts: for each expert the matrices gate and up, or only up, [features, width of h],
          and then down [width of `to`, features], by name.
        bias, factors, table, groups, near: see `Route`; the first three are full names.
        limit, gate_limit: the maximum of gates and ups (see `Limit`); 0 = none.
        biased: whether the router and all matrices of experts have biases.
        identities: how many further experts return h; the router has their logits last.
        weigh_inputs: whether the weight of an expert multiplies its input, not its output.
        """
        count, width = len(experts) + identities, self._width(h)
        self._check_mixture(router, count, chosen, groups, biased and weigh_inputs)
        read = h if routed_by is None else routed_by
        logits = self.linear(read, router, features=count, bias=biased)
        more = (groups, factors, near, identities, table)
        routing = self._route(logits, router, chosen, score, renormalize, scale, bias, *more)
        rows = self._value(f"{router} rows", width, chosen)
        self._ops.append(Dispatch(h, routing, rows, width, chosen))
        ups, down = [names[:-1] for names in experts], [names[-1:] for names in experts]
        apart = bool(limit) or weigh_inputs
        wide, fused = (2 * features, "none") if apart else (features, then)
        hidden = self._value(f"{router} hidden", wide, chosen)
        self._expert_linear(rows, routing, hidden, ups, features, cast("Then", fused), biased)
        if apart:
            hidden = self._activate(hidden, routing, then, (limit, gate_limit), weigh_inputs)
        out_width = width if to is None else self._width(to)
        out = self._value(f"{router} out", out_width, chosen)
        self._expert_linear(hidden, routing, out, down, out_width, "none", biased, "down")
        total = self._value(f"{router} sum", out_width) if to is None else to
        combined = (out, routing, total, out_width, chosen, to is not None)
        self._ops.append(Combine(*combined, weighted=not weigh_inputs))
        if identities:
            self._ops.append(AddIdentities(h, routing, total, chosen))
        return total

    def _check_mixture(
        self, router: str, count: int, chosen: int, groups: Groups | None, biased_inputs: bool
    ) -> None:
        why = f"{chosen} of {count} experts cannot be chosen for a token"
        if self._adapters is not None:
            why = "adapters of a mixture of experts are not supported"
        elif biased_inputs:
            why = "weights of inputs need experts without biases"
        elif 1 <= chosen <= count:
            return _check_groups(router, groups, count, chosen)
        msg = f"{router}: {why}"
        raise ModelError(msg)

    def _activate(
        self,
        hidden: ValueId,
        routing: ValueId,
        then: Then,
        limits: tuple[float, float],
        weigh_inputs: bool,
    ) -> ValueId:
        """Return the activation of gates and ups; their products are weighed like an input."""
        if weigh_inputs:
            self._ops.append(WeighRows(hidden, routing, self._values[hidden].copies))
        if limits[0]:
            self._ops.append(Limit(hidden, *limits))
        return self.activation(hidden, then)

    def _route(
        self,
        logits: ValueId,
        router: str,
        chosen: int,
        score: RouterScore,
        renormalize: bool,
        scale: float,
        bias: str | None,
        groups: Groups | None,
        factors: str | None,
        near: float,
        identities: int,
        table: str | None,
    ) -> ValueId:
        """Return the experts that each token chooses, and their weights: [T, 2 * chosen]."""
        count = self._width(logits)
        self._keep_exact(logits)
        for name in filter(None, (bias, factors)):
            self._need(name, (count,), "vector")
        routing = self._value(f"{router} routing", 2 * chosen)
        weights = (score, renormalize, scale, bias)
        more = groups, factors, near, identities
        ids = 0 if table is None else self._spec.vocab
        if table is not None:
            self._need(table, (ids, chosen), "ids")
        self._ops.append(
            Route(logits, routing, count, chosen, *weights, *more, table=table, ids=ids)
        )
        return routing


def _check_groups(router: str, groups: Groups | None, experts: int, chosen: int) -> None:
    if groups is None:
        return
    size = experts // groups.count
    fits = experts == size * groups.count and groups.best <= size
    if not fits or not 1 <= groups.kept <= groups.count or groups.kept * size < chosen:
        msg = (
            f"{router}: {chosen} of {experts} experts cannot be chosen from {groups.kept} of "
            f"{groups.count} groups"
        )
        raise ModelError(msg)
