"""Sums, factors, gates and copies of columns of rows."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from cpuserve.base.errors import ModelError
from cpuserve.program.base_builder import BaseBuilder
from cpuserve.program.ops import Op, ValueId
from cpuserve.program.program import Program, Value

if TYPE_CHECKING:
    from torch import Tensor

    from cpuserve.program.interpret import Interpreter
    from cpuserve.program.loads import Float32, ReadFn
    from cpuserve.program.lower import Lowering

MOST_PARTS = 8  # the maximum of `parts` in MixParts: csrc/runtime/operations/columns.h


class Gate(Op, frozen=True):
    """out[t] *= sigmoid(x[t, column:]). Each gate multiplies `columns` columns of out.

    plain: out is multiplied by the gate itself, not by its sigmoid.
    """

    reads_of = ("x", "out")

    x: ValueId
    out: ValueId
    width: int
    column: int = 0
    columns: int = 1
    plain: bool = False

    def reference(self, at: Interpreter, x: Tensor, out: Tensor) -> Tensor:
        import torch

        gates = x[:, self.column : self.column + self.width // self.columns]
        gates = gates.repeat_interleave(self.columns, dim=1)
        return out * (gates if self.plain else torch.sigmoid(gates))


class SoftGate(Op, frozen=True):
    """Multiply part i of out, in place, by softplus(column i of x), for equal parts (Laguna)."""

    reads_of = ("x", "out")

    x: ValueId
    out: ValueId

    def reference(self, at: Interpreter, x: Tensor, out: Tensor) -> Tensor:
        from torch.nn import functional as F

        return out * F.softplus(x).repeat_interleave(out.shape[1] // x.shape[1], dim=1)


class Xielu(Op, frozen=True):
    """The activation xIELU, in place.

        x > 0:    beta * x + alpha_p * x^2
        x <= 0:   beta * x + alpha_n * (exp(x) - 1 - x)

    Here alpha_p = softplus(p) and alpha_n = beta + softplus(n).
    In the published activation, exp(x) is exp(epsilon) if x is between epsilon and 0.
    Epsilon must be so small that this makes no difference.
    Source: xIELU of Apertus, arXiv 2411.13010, as in transformers activations.py.

    factors: the parameters p, n, beta and epsilon, as numbers or as weights of one element.
    """

    write_of = "x"

    x: ValueId
    width: int
    factors: tuple[str, ...] | tuple[float, ...]

    def lower(self, to: Lowering) -> None:
        to.add(self, factors=to.vector(("xielu", self.factors), 3, self._alphas))

    def _alphas(self, read: ReadFn) -> Float32:
        """Return alpha_p, alpha_n and beta of xIELU; ModelError if epsilon is not small enough."""
        import numpy as np

        given = [float(read(f).reshape(-1)[0]) if isinstance(f, str) else f for f in self.factors]
        p, n, beta, epsilon = given
        if not -1e-5 <= epsilon <= 0:
            msg = f"{self.factors[3]} is {epsilon:g}, but xIELU needs an epsilon from -1e-5 to 0"
            raise ModelError(msg)
        alphas = np.logaddexp(0.0, [p, n]) + np.asarray([0.0, beta])
        return np.asarray([*alphas, beta], np.float32)

    def reference(self, at: Interpreter, x: Tensor) -> Tensor:
        import torch

        p, n, beta = (float(a) for a in self._alphas(lambda name: at.vector(name).numpy()))
        positive = beta * x + p * x.square()
        return torch.where(x > 0, positive, beta * x + n * (torch.expm1(x.clamp(max=0)) - x))


class Add(Op, frozen=True):
    """out[:, column : column + width] += x [T, width]."""

    reads_of = ("x", "out")

    x: ValueId
    out: ValueId
    width: int
    column: int = 0

    def reference(self, at: Interpreter, x: Tensor, out: Tensor) -> Tensor:
        out = out.clone()
        out[:, self.column : self.column + self.width] += x
        return out


class Scale(Op, frozen=True):
    """x *= weight, in place. The weight has one element, or, if `by_column`, `width` (Gemma 3n).

    Without a weight, columns are multiplied by constants: `runs` lists (number of columns, factor).
    less: a weight [width] that is first subtracted from each row.
    """

    write_of = "x"

    x: ValueId
    weight: str | None
    width: int
    by_column: bool = False
    runs: tuple[tuple[int, float], ...] = ()
    less: str | None = None

    def lower(self, to: Lowering) -> None:
        factor = to.plain(self.weight, self.width if self.by_column else 1)
        if self.weight is None:
            factor = to.vector(("factors", self.runs), self.width, lambda _: self._factors())
        to.add(self, factor=factor, less=to.plain(self.less, self.width))

    def _factors(self) -> Float32:
        import numpy as np

        counts, factors = zip(*self.runs, strict=True)
        return np.repeat(np.array(factors, np.float32), counts)

    def reference(self, at: Interpreter, x: Tensor) -> Tensor:
        import torch

        if self.weight is None:
            return x * torch.from_numpy(self._factors())
        return (x if self.less is None else x - at.vector(self.less)) * at.vector(self.weight)


class ScaleByLambda(Op, frozen=True):
    """x *= exp(q1 . k1) - exp(q2 . k2) + plus, in place; negative: x is also negated.

    weights: the vectors q1, k1, q2 and k2 [any width], by name.
    Source: differential attention, Ye et al. 2024, as in transformers modeling_diffllama.
    """

    write_of = "x"

    x: ValueId
    weights: tuple[str, str, str, str]
    plus: float
    negative: bool = False

    def lower(self, to: Lowering) -> None:
        key = ("lambda", self.weights, self.plus, self.negative)
        to.add(self, "scale", factor=to.vector(key, 1, self._factor), less=-1)

    def _factor(self, read: ReadFn) -> Float32:
        import numpy as np

        q1, k1, q2, k2 = (read(name).astype(np.float64) for name in self.weights)
        dots = (math.fsum((q * k).tolist()) for q, k in ((q1, k1), (q2, k2)))
        first, second = map(math.exp, dots)
        value = first - second + self.plus
        return np.array([-value if self.negative else value], np.float32)

    def reference(self, at: Interpreter, x: Tensor) -> Tensor:
        q1, k1, q2, k2 = (at.vector(name) for name in self.weights)
        value = (q1 @ k1).exp() - (q2 @ k2).exp() + self.plus
        return x * (-value if self.negative else value)


class Clip(Op, frozen=True):
    """out = x with each value limited to [low, high], numbers or weights of one element.

    out: None = x itself is changed.
    """

    x: ValueId
    out: ValueId | None
    low: str | float
    high: str | float

    def written(self) -> ValueId:
        """Return `out`, or x if it is changed in place."""
        return self.x if self.out is None else self.out

    def lower(self, to: Lowering) -> None:
        import numpy as np

        def make(read: ReadFn) -> Float32:
            bounds = (self.low, self.high)
            numbers = [read(x).reshape(-1)[0] if isinstance(x, str) else x for x in bounds]
            return np.array(numbers, np.float32)

        to.add(self, bounds=to.vector(("bounds", self.low, self.high), 2, make))

    def can_write(self, rows: str, to: Lowering) -> bool:
        """Return whether `rows` is f32, or any other format, which the kernel can write to out."""
        return self.out is not None or rows == "f32"

    def reference(self, at: Interpreter, x: Tensor) -> Tensor:
        import torch

        low, high = (
            at.vector(bound) if isinstance(bound, str) else torch.tensor(bound, dtype=x.dtype)
            for bound in (self.low, self.high)
        )
        return x.clamp(low, high)


class Columns(Op, frozen=True):
    """out = x[:, column : column + width], followed by the columns of `more` if it is not None."""

    x: ValueId
    out: ValueId
    width: int
    column: int = 0
    more: ValueId | None = None

    def reads(self) -> tuple[ValueId, ...]:
        """Return x and, if it is not None, the value `more`."""
        return (self.x,) if self.more is None else (self.x, self.more)

    def reference(self, at: Interpreter, x: Tensor, more: Tensor | None = None) -> Tensor:
        import torch

        own = x[:, self.column : self.column + self.width]
        return own.clone() if more is None else torch.cat([own, more], dim=1)


class MixParts(Op, frozen=True):
    """Add a weighted sum of all parts of x, or a correction, to each part; in place.

    With g = tanh(gates[t]) [k], the coefficients are c = weight g.
    Without `target`, weight is [parts * parts, k],
    and the sum over j of c[i parts + j] part j is added to part i.
    With target [T, width], weight is [parts, k],
    and (1 + c[i]) (scale target - part `active`) is added to part i.
    The sums use the values that the parts had before the op.
    Source: AltUp (Baykal et al. 2023) as in transformers modeling_gemma3n, predict and correct.
    """

    write_of = "x"

    x: ValueId
    gates: ValueId
    weight: str
    parts: int
    width: int
    gate_width: int
    target: ValueId | None = None
    active: int = 0
    scale: float = 1.0

    def reads(self) -> tuple[ValueId, ...]:
        """Return the gates, the target if there is one, and x."""
        return (self.gates, self.x) if self.target is None else (self.gates, self.target, self.x)

    def lower(self, to: Lowering) -> None:
        rows = self.parts * self.parts if self.target is None else self.parts
        to.add(self, weight=to.plain(self.weight, rows * self.gate_width))

    def reference(
        self, at: Interpreter, gates: Tensor, target_or_x: Tensor, x: Tensor | None = None
    ) -> Tensor:
        import torch

        coefficients = torch.tanh(gates) @ at.vector(self.weight).T
        parts = (target_or_x if x is None else x).reshape(len(gates), self.parts, self.width)
        if x is None:
            by = coefficients.reshape(len(gates), self.parts, self.parts)
            return (parts + by @ parts).reshape(len(gates), -1)
        change = self.scale * target_or_x - parts[:, self.active]
        return (parts + (1 + coefficients)[..., None] * change[:, None]).reshape(len(gates), -1)


class MatchRms(Op, frozen=True):
    """Scale each of `parts` parts of x, in place, to the root mean square of the value `like`.

    x [T, parts * width]; like [T, width]. A mean square of a part below `floor` counts as `floor`.
    """

    reads_of = ("like", "x")
    write_of = "x"

    x: ValueId
    like: ValueId
    width: int
    parts: int
    floor: float

    def reference(self, at: Interpreter, like: Tensor, x: Tensor) -> Tensor:
        wanted = like.square().mean(dim=1).sqrt()[:, None, None]
        parts = x.reshape(len(x), self.parts, self.width)
        own = parts.square().mean(dim=2, keepdim=True).clamp(min=self.floor).sqrt()
        return (parts * wanted / own).reshape(x.shape)


class KeepTop(Op, frozen=True):
    """relu(x - cutoff) for the first `width` columns of x, in place (the sparse MLPs of Gemma 3n).

    cutoff: the mean of these columns plus `deviations` times their standard deviation.
    The standard deviation divides by width, not by width - 1.
    """

    write_of = "x"

    x: ValueId
    width: int
    deviations: float

    def reference(self, at: Interpreter, x: Tensor) -> Tensor:
        import torch
        from torch.nn import functional as F

        own, rest = x[:, : self.width], x[:, self.width :]
        deviation, mean = torch.std_mean(own, dim=1, correction=0, keepdim=True)
        return torch.cat([F.relu(own - mean - self.deviations * deviation), rest], dim=1)


class Limit(Op, frozen=True):
    """Limit the columns of x, in place: gates to at most `gates`, ups to [-limit, limit].

    If `gates` is 0, gates are limited to at most `limit`.

    Gates are the first half of the columns, ups the second half.
    x may have several rows for each token, such as the rows of its experts.
    Source: transformers modeling_glm5_next (swiglu_limit).
    """

    write_of = "x"

    x: ValueId
    limit: float
    gates: float = 0.0

    def reference(self, at: Interpreter, x: Tensor) -> Tensor:
        import torch

        gates, ups = x.chunk(2, dim=1)
        most = self.gates or self.limit
        return torch.cat([gates.clamp(max=most), ups.clamp(-self.limit, self.limit)], dim=1)


def with_taps(program: Program, layers: Sequence[int]) -> Program:
    """Return the program that also keeps the inputs of `layers`, side by side (Logits.kept).

    The number of layers stands for the input of the norm after the last layer. All other values
    are the same.

    Raises:
        ModelError: the program has no such layer, or its layers have no common stream.
    """
    ops, values = list(program.ops), list(program.values)
    number = max(value.id for value in values)
    found: ValueId | None = None
    for count, layer in enumerate(layers):
        at = _begin_of(ops, layer)
        stream = ops[at].reads()[0] if at >= 0 else None
        value = next((v for v in values if v.id == stream), None)
        sizes = None if value is None else (value.width, value.copies, value.fold)
        if stream is None or value is None or sizes != (program.width, 1, 1):
            msg = f"the model has no residual stream before layer {layer} that a head could read"
            raise ModelError(msg)
        out = ValueId(number + count + 1)
        values.append(Value(out, f"inputs of {count + 1} layers", (count + 1) * value.width))
        # Columns puts its own columns first, so that the earlier layers are `x`.
        first, more = (stream, None) if found is None else (found, stream)
        ops.insert(at, Columns(first, out, max(count, 1) * value.width, 0, more))
        found = out
    ops[-1] = msgspec.structs.replace(ops[-1], kept=found)
    return replace(program, ops=tuple(ops), values=tuple(values))


def _begin_of(ops: Sequence[Op], layer: int) -> int:
    """Return the index of the first op of a layer; after the last layer, of the last norm.

    -1: there is no such layer.
    """
    name = re.compile(rf"(?:^|\.)(?:layers|h|blocks)\.{layer}\.")
    before = re.compile(rf"(?:^|\.)(?:layers|h|blocks)\.{layer - 1}\.")
    places = [i for i, op in enumerate(ops) if any(map(name.search, _names_in(op)))]
    if places:
        return places[0]
    if not any(before.search(text) for op in ops for text in _names_in(op)):
        return -1
    last = ops[-1].reads()[0]
    return max((i for i, op in enumerate(ops) if op.written() == last), default=-1)


def _names_in(op: Op) -> Iterator[str]:
    """Return the texts in the fields of an op, such as the names of its weights."""
    left: list[object] = list(msgspec.structs.astuple(op))
    while left:
        item = left.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, tuple):
            left.extend(item)


class ColumnsBuilder(BaseBuilder):
    """Appends operations on columns."""

    def limit(self, x: ValueId, limit: float, gates: float = 0.0) -> None:
        """Limit gates and ups, the halves of the columns of x, in place (see `Limit`)."""
        if self._width(x) % 2:
            msg = f"limit: {self._width(x)} columns do not have equal halves"
            raise ModelError(msg)
        self._ops.append(Limit(x, limit, gates))

    def multiply(self, x: ValueId, *, to: ValueId, column: int = 0) -> None:
        """Multiply `to` [T, width], in place, by `width` columns of x, which begin at `column`."""
        width = self._width(to)
        self._check_columns("multiply", x, column, width)
        self._ops.append(Gate(x, to, width, column, plain=True))

    def gate(self, x: ValueId, *, to: ValueId, heads: int = 0) -> None:
        """Multiply `to` [T, width], in place, by the sigmoid of the last `width` columns of x.

        heads: x has this many gates, and each multiplies an equal part of `to`.
          If x has only one column, its sigmoid multiplies all columns of `to`.
        """
        width, columns = self._width(to), self._width(x)
        gates = 1 if columns == 1 else heads or width
        if columns < gates or width % gates:
            msg = f"gate: {self._values[x].name} has {columns} columns for {gates} gates of {width}"
            raise ModelError(msg)
        self._ops.append(Gate(x, to, width, columns - gates, width // gates))

    def soft_gate(self, x: ValueId, *, to: ValueId) -> None:
        """Multiply equal parts of `to`, in place, by softplus(x).

        Each column of x belongs to one part.
        """
        width, gates = self._width(to), self._width(x)
        if width % gates:
            msg = f"soft_gate: {width} columns are not equal parts for {gates} gates"
            raise ModelError(msg)
        self._ops.append(SoftGate(x, to))

    def xielu(self, x: ValueId, name: str, factors: tuple[float, ...] = ()) -> None:
        """Apply xIELU to x, in place.

        name: the name of the module with the parameters.
        factors: the values of the parameters; () = they are weights (see `Xielu`).
        """
        shapes = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
        named = tuple(f"{name}.{part}" for part in shapes)
        if not factors:
            for weight, shape in zip(named, shapes.values(), strict=True):
                self._need(weight, shape, "vector")
        self._ops.append(Xielu(x, self._width(x), factors or named))

    def add(self, x: ValueId, *, to: ValueId, column: int | None = None) -> None:
        """Add x, in place, to the value `to`, or only to the columns of `to` from `column` on."""
        width = self._width(x)
        if column is None:
            self._check_width("add", to, width)
        self._check_columns("add", to, column or 0, width)
        self._ops.append(Add(x, to, width, column or 0))

    def clip(
        self, x: ValueId, low: str | float, high: str | float, *, copy: bool = False
    ) -> ValueId:
        """Limit the values of x to [low, high], numbers or weights of one element; return x.

        copy: x does not change, and the result is another value.
        """
        for bound in (low, high):
            if isinstance(bound, str):
                self._need(bound, (), "vector")
        out = None
        if copy:
            out = self._value(f"{self._values[x].name} clipped", self._width(x), like=x)
        self._ops.append(Clip(x, out, low, high))
        return x if out is None else out

    def scale(
        self, x: ValueId, name: str, *, by_column: bool = False, less: str | None = None
    ) -> None:
        """Multiply x, in place, by the weight `name` [1], or [width of x] if `by_column`.

        less: the name of a weight [width of x] that is first subtracted from each row.
        """
        width = self._width(x)
        weight = self._need(name, (width if by_column else 1,), "vector")
        if less is not None:
            self._need(less, (width,), "vector")
        self._ops.append(Scale(x, weight, width, by_column, less=less))

    def scale_by_lambda(
        self, x: ValueId, name: str, *, width: int, plus: float, negative: bool = False
    ) -> None:
        """Multiply x, in place, by a number made from four vectors (see `ScaleByLambda`).

        name: the name of the module with the vectors [width], lambda_q1, _k1, _q2 and _k2.
        """
        q1, k1, q2, k2 = (
            self._need(f"{name}.lambda_{part}", (width,), "vector")
            for part in ("q1", "k1", "q2", "k2")
        )
        self._ops.append(ScaleByLambda(x, (q1, k1, q2, k2), plus, negative))

    def multiply_by(self, x: ValueId, factors: float | Sequence[tuple[int, float]]) -> None:
        """Multiply x by constants, in place. If all factors are 1, no op is appended.

        factors: one factor, or (number of columns, factor) for each part of x, in order.
        """
        width = self._width(x)
        runs = [(width, factors)] if isinstance(factors, float) else factors
        self._check_width("multiply_by", x, sum(count for count, _ in runs))
        if any(factor != 1.0 for _, factor in runs):
            self._ops.append(Scale(x, None, width, runs=tuple(runs)))

    def columns(
        self, x: ValueId, width: int, *, column: int = 0, more: ValueId | None = None
    ) -> ValueId:
        """Return a copy of `width` columns of x from `column` on, followed by a copy of `more`."""
        self._check_columns("columns", x, column, width)
        total = width + (0 if more is None else self._width(more))
        out = self._value("columns", total, like=x)
        self._ops.append(Columns(x, out, width, column, more))
        return out

    def mix_parts(
        self,
        x: ValueId,
        gates: ValueId,
        name: str,
        *,
        parts: int,
        target: ValueId | None = None,
        active: int = 0,
        scale: float = 1.0,
    ) -> None:
        """Mix `parts` equal parts of x, in place, or correct them by a target (see `MixParts`).

        name: the weight [parts * parts, width of gates];
        with a target it is [parts, width of gates].
        """
        width, k = self._width(x) // max(parts, 1), self._width(gates)
        if not 1 <= parts <= MOST_PARTS or width * parts != self._width(x):
            msg = f"{name}: {self._width(x)} columns are not 1 to {MOST_PARTS} equal parts: {parts}"
            raise ModelError(msg)
        if target is not None:
            self._check_width(f"{name}: target", target, width)
        rows = parts * parts if target is None else parts
        weight = self._need(f"{name}.weight", (rows, k), "table")
        self._keep_exact(gates)
        self._ops.append(MixParts(x, gates, weight, parts, width, k, target, active, scale))

    def match_rms(self, x: ValueId, *, like: ValueId, floor: float) -> None:
        """Scale parts of x as wide as `like`, in place, to the root mean square of `like`.

        floor: a mean square of a part below `floor` counts as `floor`.
        """
        width = self._width(like)
        parts = max(self._width(x) // width, 1)
        self._check_width("match_rms", x, parts * width)
        self._ops.append(MatchRms(x, like, width, parts, floor))

    def keep_top(self, x: ValueId, *, width: int, deviations: float) -> None:
        """Replace the first `width` columns of x by max(0, x - cutoff), in place.

        The cutoff is the mean of these columns plus `deviations` times their standard deviation.
        """
        self._check_columns("keep_top", x, 0, width)
        self._ops.append(KeepTop(x, width, deviations))
