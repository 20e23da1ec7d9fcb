"""Embeddings, linears, activations and the last operations of a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from msgspec import structs

from cpuserve.base.errors import ModelError
from cpuserve.program.base_builder import join, then_width
from cpuserve.program.loads import TableLoad
from cpuserve.program.lora import name_table
from cpuserve.program.operations.experts import ExpertsBuilder
from cpuserve.program.ops import Op, Then, ValueId, split_then
from cpuserve.program.program import Program, Use
from cpuserve.program.row_formats import WHOLE_ROW
from cpuserve.program.tables import line_waves

if TYPE_CHECKING:
    from torch import Tensor

    from cpuserve.program.interpret import Interpreter
    from cpuserve.program.loads import Float32, ReadFn
    from cpuserve.program.lower import Lowering


class Embed(Op, frozen=True):
    """out[t] = scale * weight[token_ids[t]]; weight [vocab, D]. Token ids >= vocab get row 0.

    media: whether a token with a row of the media buffer (a part of a picture) gets this "row",
      not scaled, or "zero", or the row of its "id", or the row of the "other" id.
    other: this id.
    """

    reads_of = ()

    out: ValueId
    weight: str
    vocab: int
    width: int
    scale: float = 1.0
    media: Literal["id", "row", "zero", "other"] = "id"
    other: int = 0

    @property
    def media_width(self) -> int:
        """Return the width of the embedding, if rows of the media buffer replace it."""
        return self.width if self.media == "row" else 0

    def lower(self, to: Lowering) -> None:
        if to.order(self.weight) is not None:
            msg = f"{self.weight} has an activation order (g_idx), which embeddings cannot have"
            raise ModelError(msg)
        matrix = lookup_table(to, self.weight, self.vocab, self.width, gathers(to, self.weight))
        to.add(self, matrix=matrix)

    def looked_up(self) -> tuple[str, ...]:
        """Return the name of the embedding table."""
        return (self.weight,)

    def reference(self, at: Interpreter) -> Tensor:
        import torch

        from cpuserve.program.reference.quantized import QuantMatrix

        ids = torch.from_numpy(at.step.token_ids).long()
        ids = torch.where(ids < self.vocab, ids, 0)
        media = torch.from_numpy(at.step.media_rows).long()
        has = media >= 0
        if self.media == "other" and len(has):
            ids[has] = self.other
        weight = at.matrix(self.weight)
        rows = weight.rows(ids) if isinstance(weight, QuantMatrix) else weight[ids].float()
        rows = rows * self.scale
        if self.media in ("id", "other") or not len(has):
            return rows
        rows[has] = at.media[media[has], : self.width] if self.media == "row" else 0.0
        return rows


class AddMedia(Op, frozen=True):
    """x[t] += columns of the token's row of the media buffer, from `column` on, if it has one."""

    write_of = "x"

    x: ValueId
    width: int
    column: int

    @property
    def media_width(self) -> int:
        """Return how many columns the rows of the media buffer need."""
        return self.column + self.width

    def reference(self, at: Interpreter, x: Tensor) -> Tensor:
        import torch

        if not len(at.step.media_rows):
            return x
        media = torch.from_numpy(at.step.media_rows).long()
        has, out = media >= 0, x.clone()
        out[has] += at.media[media[has], self.column : self.column + self.width]
        return out


class PositionEmbed(Op, frozen=True):
    """x[t] += weight[positions[t] + offset]; weight [rows, D] (OPT: offset 2).

    types: a weight [kinds, D]; its row 0 is added as well (the token types of BERT).
      If `weight` is None, only this row is added.
    span: above 0 = the weight is no tensor but `line_waves` of this span (XGLM, CTRL).
    axis: the token's place on this axis selects the row, at most the last row; -1 = its
      position does. The weight may then have more rows than `rows`.
    of: (index, count): such a weight is [rows, count, D], and row `index` of a place is added.
    """

    write_of = "x"

    x: ValueId
    weight: str | None
    rows: int
    width: int
    offset: int = 0
    types: str | None = None
    axis: int = -1
    span: float = 0.0
    of: tuple[int, int] = (0, 1)

    @property
    def num_axes(self) -> int:
        """Return the number of axes that the row depends on."""
        return self.axis + 1

    def lower(self, to: Lowering) -> None:
        if self.axis >= 0:
            key: tuple[object, ...] = ("first rows", self.weight, self.rows, self.of)
            table = to.vector(key, self.rows * self.width, self._first)
        elif self.span:
            key = ("waves", self.rows, self.width, self.span)
            table = to.vector(key, self.rows * self.width, lambda _: self._waves())
        elif self.types is None:
            table = to.plain(self.weight, self.rows * self.width)
        else:
            key = ("positions", self.weight, self.types)
            table = to.vector(key, self.rows * self.width, self._rows)
        to.add(self, table=table)

    def _waves(self) -> Float32:
        return line_waves(self.rows, self.width, self.span)

    def _first(self, read: ReadFn) -> Float32:
        assert self.weight is not None
        index, count = self.of
        return read(self.weight).reshape(-1, count, self.width)[: self.rows, index]

    def _rows(self, read: ReadFn) -> Float32:
        """Return the rows [rows, width] to add at each position, with the row of token type 0."""
        import numpy as np

        zeros = (self.rows, self.width)
        rows = np.zeros(zeros, np.float32) if self.weight is None else read(self.weight)
        return rows if self.types is None else rows + read(self.types)[:1]

    def reference(self, at: Interpreter, x: Tensor) -> Tensor:
        import torch

        if self.span:
            x = x + torch.from_numpy(self._waves())[at.positions + self.offset]
        if self.weight is not None:
            places = at.positions + self.offset
            if self.axis >= 0:
                assert at.step.token_angles is not None, "the step has no angles"
                places = torch.from_numpy(at.step.token_angles[self.axis]).long()
            index, count = self.of
            table = at.vector(self.weight).reshape(-1, count, self.width)[:, index]
            x = x + table[places.clamp(max=self.rows - 1)]
        return x if self.types is None else x + at.vector(self.types)[0]


class Linear(Op, frozen=True):
    """y = then(x W^T + b), where W has the rows of all `weights`; out = y, or out += y if `add`.

    weights[i] is [features[i], in_features]; biases[i] is None if matrix i has no bias.
    A `then` called "*_mul" needs exactly two weights of equal features (gate, up)
    and computes act(gate) * up.
    With `add`, `out` is an existing value of the same width as y.
    """

    claimed = True

    x: ValueId
    out: ValueId
    weights: tuple[str, ...]
    biases: tuple[str | None, ...]
    features: tuple[int, ...]
    in_features: int
    then: Then = "none"
    add: bool = False

    def reads(self) -> tuple[ValueId, ...]:
        """Return x and, with `add`, the value that the product is added to."""
        return (self.x, self.out) if self.add else (self.x,)

    def lower(self, to: Lowering) -> None:
        if not self.splits(to):
            self._lower_part(to, self.weights, self.biases, self.features, to.value(self.out), 0)
            return
        activation, glu = split_then(self.then)
        if not glu:
            self._lower_runs(to, to.value(self.out), self.then)
            return
        # gate and up with different layouts cannot share a matrix:
        # compute both products, then act(gate) * up.
        width = sum(self.features)
        both = to.take(width, "f32")
        self._lower_runs(to, both, "none")
        to.add(self, "activation", x=both, activation=activation, glu=True)
        to.give(both, width, "f32")

    def _lower_runs(self, to: Lowering, out: int, then: Then) -> None:
        """Append a linear for each run of matrices of equal layout; it writes columns of `out`."""
        start = column = 0
        layouts = [to.layout(w) for w in self.weights]
        for end in range(1, len(layouts) + 1):
            if end < len(layouts) and layouts[end] == layouts[start]:
                continue
            part = slice(start, end)
            weights, features = self.weights[part], self.features[part]
            self._lower_part(to, weights, self.biases[part], features, out, column, then)
            start, column = end, column + sum(features)

    def _lower_part(
        self,
        to: Lowering,
        weights: tuple[str, ...],
        biases: tuple[str | None, ...],
        features: tuple[int, ...],
        out: int,
        column: int,
        then: Then | None = None,
    ) -> None:
        activation, glu = split_then(self.then if then is None else then)
        read = to.read(weights[0], sum(features), self.in_features)
        to.out.linear_weights += read.n * read.k
        to.add(
            self,
            read=read,
            x=to.stored_as(self.x, to.act_format(weights[0]), to.orders_of(weights[0])),
            out=out,
            matrix=to.matrix(weights, features, self.in_features, glu),
            bias=to.bias(biases, features),
            activation=activation,
            glu=glu,
            out_column=column,
        )

    def splits(self, to: Lowering) -> bool:
        """Return whether kinds or column orders differ: the weights are then several matrices."""
        return len({to.layout(w) for w in self.weights}) > 1

    def read_formats(self, value: ValueId, to: Lowering) -> set[str]:
        """Return the row formats that the matrices need for x; f32 for another value."""
        return {to.read_format(w) for w in self.weights} if value == self.x else {"f32"}

    def can_write(self, rows: str, to: Lowering) -> bool:
        """Return whether kernels, which write strips of columns, can write row format `rows`."""
        return rows not in WHOLE_ROW and not self.splits(to)

    def reference(self, at: Interpreter, x: Tensor, out: Tensor | None = None) -> Tensor:
        import torch

        from cpuserve.program.reference.rows import activate

        parts = [at.multiply(x, w) for w in self.weights]
        biased = [
            y if b is None else y + at.vector(b) for y, b in zip(parts, self.biases, strict=True)
        ]
        y = activate(torch.cat(biased, dim=1), self.then)
        return y if out is None else out + y


class ActivationOp(Op, frozen=True):
    """out = act(x); for "*_mul", out = act(first half of the columns of x) * (second half)."""

    x: ValueId
    out: ValueId
    width: int
    then: Then

    def lower(self, to: Lowering) -> None:
        activation, glu = split_then(self.then)
        to.add(self, "activation", activation=activation, glu=glu)

    def can_write(self, rows: str, to: Lowering) -> bool:
        """Return True: the kernel can write rows of any format."""
        return True

    def reference(self, at: Interpreter, x: Tensor) -> Tensor:
        from cpuserve.program.reference.rows import activate

        return activate(x, self.then)


class Logits(Op, frozen=True):
    """Logits of the step's logit rows (at most 32 at a time), then sampling or scoring.

    logits = scale (x W^T + bias). If softcap > 0, they become softcap tanh(logits / softcap).
    weight [vocab, D]: a tied model has the name of its embedding here,
    and both uses share one packed matrix.
    kept: the value with the rows that `Executor.read_hidden` returns; None = x.
    """

    write_of = None
    claimed = True

    x: ValueId
    weight: str
    vocab: int
    width: int
    scale: float = 1.0
    softcap: float = 0.0
    bias: str | None = None
    kept: ValueId | None = None

    def reads(self) -> tuple[ValueId, ...]:
        """Return x and, if it is not None, the value `kept`."""
        return (self.x,) if self.kept is None else (self.x, self.kept)

    def lower(self, to: Lowering) -> None:
        matrix = to.matrix((self.weight,), (self.vocab,), self.width, False)
        x = to.stored_as(self.x, to.act_format(self.weight), to.orders_of(self.weight))
        bias = to.plain(self.bias, self.vocab)
        read = to.read(self.weight, self.vocab, self.width)
        to.add(self, read=read, x=x, matrix=matrix, bias=bias)

    def read_formats(self, value: ValueId, to: Lowering) -> set[str]:
        """Return the row format that the matrix needs for x; f32 for other values."""
        return {to.read_format(self.weight)} if value == self.x else {"f32"}

    def reference(self, at: Interpreter, x: Tensor, kept: Tensor | None = None) -> Tensor:
        del kept
        return self.of_rows(at, x[at.row_token])

    def of_rows(self, at: Interpreter, rows: Tensor) -> Tensor:
        """Return the logits of `rows`, which are rows of x."""
        from cpuserve.program.reference.rows import soften

        y = at.multiply(rows, self.weight)
        if self.bias is not None:
            y = y + at.vector(self.bias)
        return soften(y * self.scale, self.softcap)


class Hidden(Op, frozen=True):
    """The rows of x [T, width] with row_target -2 in StepArrays, unchanged, in fp32.

    Hidden is the last op of an embedding model, as Logits is of a model that writes text.
    """

    write_of = None

    x: ValueId
    width: int

    def reference(self, at: Interpreter, x: Tensor) -> Tensor:
        return x


class DenseBuilder(ExpertsBuilder):
    """Appends linears and the first and last operations of a program."""

    def embed(
        self,
        name: str,
        *,
        vocab: int | None = None,
        width: int | None = None,
        scale: float = 1.0,
        other: int | None = None,
        use: Use = "embedding",
    ) -> ValueId:
        """Return scale * (the embedding row of each token): [T, width].

        Rows of the media buffer replace embeddings of the width of the model.

        vocab, width: the shape of the matrix `name`; by default as in the spec.
        other: tokens of pictures have the row of this id, if `width` is given; None = their own.
        use: "layers" if a row has the embeddings of a token for all layers.
        """
        media: Literal["row", "id", "other"] = "id" if width else "row"
        if width and other is not None:
            media = "other"
        vocab, width = vocab or self._spec.vocab, width or self._spec.width
        weight = self._matrix(name, vocab, width, use=use)
        out = self._value(name, width)
        out = self._append_embedding(Embed(out, weight, vocab, width, scale, media, other or 0))
        self._route_adapters()
        adapters = self._adapters
        if adapters is not None and adapters.in_tables and name in adapters.modules:
            columns = adapters.in_tables * adapters.rank
            table = self._matrix(name_table(name), vocab, columns)
            adapter_rows = self._value(f"{name} of adapters", columns)
            self._ops.append(Embed(adapter_rows, table, vocab, columns, scale, "zero"))
            self._add_adapters_of_table(adapter_rows, name, out)
        return out

    def _append_embedding(self, op: Embed) -> ValueId:
        """Append `op`, restore its rows if the table is rotated, and return the rows.

        Rows of the media buffer are not rotated, so they are added after that.
        """
        rotated = self._spec.rotation is not None and op.weight in self._spec.rotation.tables
        adds_media = rotated and op.media == "row"
        self._ops.append(structs.replace(op, media="zero") if adds_media else op)
        out = self._restored(op.out, op.weight)
        if adds_media:
            self.add_media(out, column=0)
        return out

    def add_media(self, x: ValueId, *, column: int) -> None:
        """Add columns of rows of the media buffer, from `column` on, to the tokens of pictures."""
        self._ops.append(AddMedia(x, self._width(x), column))

    def position_embed(
        self,
        x: ValueId,
        name: str | None,
        *,
        rows: int,
        offset: int = 0,
        types: tuple[str, int] | None = None,
        span: float = 0.0,
    ) -> None:
        """Add row (position + offset) of the learned position table [rows, width] to x, in place.

        span: the table is not learned (see `PositionEmbed`), and `name` is None.

        types: (name, rows) of the table of token types; its row 0 is added as well.
          If `name` is None, only this row is added.
        """
        width = self._width(x)
        weight = None if name is None else self._need(f"{name}.weight", (rows, width), "table")
        kinds = None
        if types is not None:
            kinds = self._need(f"{types[0]}.weight", (types[1], width), "table")
        place = (rows, width, offset, kinds)
        self._ops.append(PositionEmbed(x, weight, *place, span=span))

    def place_row(
        self,
        x: ValueId,
        name: str,
        *,
        axis: int,
        rows: int,
        stored: int,
        of: tuple[int, int] = (0, 1),
    ) -> None:
        """Add the row of each token's place on an axis to x, in place.

        name: the full name of the table [stored, width of x], with the first `rows` in use.
        of: (index, count): the table [stored, count, width of x] has a row `index` of each place.
        """
        width, (_, count) = self._width(x), of
        shape = (stored, width) if count == 1 else (stored, count, width)
        weight = self._need(name, shape, "table")
        self._ops.append(PositionEmbed(x, weight, rows, width, axis=axis, of=of))

    def linear(
        self,
        x: ValueId,
        names: str | Sequence[str],
        *,
        features: int | Sequence[int] | None = None,
        bias: bool | Sequence[bool] = False,
        then: Then = "none",
        add_to: ValueId | None = None,
        tied_to: str | None = None,
        bare: bool = False,
        use: Use | Literal["qkv"] | Sequence[Use] = "linear",
    ) -> ValueId:
        """Multiply x by the concatenated matrices, add biases, and apply the activation `then`.

        Returns [T, sum(features)].

        features: output columns of each matrix, or one number; by default the width of `add_to`.
        then: an activation called "*_mul" needs two matrices (gate, up) of equal features,
          and the result is [T, features].
        add_to: a value that the result is added to in place, and that is returned.
        tied_to: the name of the matrix; `names` is then only the name of its bias.
        bare: the tensors of the matrices are called `names`, without the suffix ".weight".
        use: what the matrices compute, or each of them; "qkv": the last one computes values.
        """
        parts = (names,) if isinstance(names, str) else tuple(names)
        label, count = join(parts), len(parts)
        if features is None:
            if add_to is None or count != 1:
                msg = f"linear {label}: features are not given; only add_to can replace them"
                raise ModelError(msg)
            features = self._width(add_to)
        sizes = (features,) * count if isinstance(features, int) else tuple(features)
        flags = (bias,) * count if isinstance(bias, bool) else tuple(bias)
        if not count == len(sizes) == len(flags):
            msg = f"linear {label}: {count} matrices, {len(sizes)} features, {len(flags)} biases"
            raise ModelError(msg)
        width, k = then_width(f"linear {label}", sizes, then), self._width(x)
        matrices = parts if tied_to is None else (tied_to,)
        weights = tuple(
            self._matrix(n, size, k, bare=bare, use=u)
            for n, size, u in zip(matrices, sizes, _uses(use, count), strict=True)
        )
        biases = tuple(
            self._need(f"{n}.bias", (size,), "vector") if flag else None
            for n, size, flag in zip(parts, sizes, flags, strict=True)
        )
        adapted = self._adapters is not None and not self._adapters.modules.isdisjoint(parts)
        # Adapters change the result before the activation, so the activation is an op of its own.
        fused: Then = "none" if adapted else then
        if add_to is None:
            out = self._value(label, sum(sizes) if fused == "none" else width, like=x)
        else:
            out = add_to
            self._check_width(f"linear {label}: add_to", add_to, width)
        self._multiply(Linear(x, out, weights, biases, sizes, k, fused, add_to is not None))
        self._products.setdefault(out, []).append((x, weights))
        if adapted:
            self._add_adapters(x, parts, sizes, out)
        return out if fused == then else self.activation(out, then)

    def _multiply(self, op: Linear) -> None:
        """Append `op`, with its x rotated if its matrices are."""
        read = self._rotated(op.x, op.weights)
        self._ops.append(op if read == op.x else structs.replace(op, x=read))

    def activation(self, x: ValueId, then: Then) -> ValueId:
        """Return act(x). For "*_mul", return act(first half of the columns) * (second half)."""
        width = self._width(x)
        if then.endswith("_mul"):
            if width % 2:
                msg = f"activation {then}: width {width} is odd, so it has no two halves"
                raise ModelError(msg)
            width //= 2
        out = self._value(then, width, like=x)
        self._ops.append(ActivationOp(x, out, width, then))
        return out

    def logits(
        self,
        x: ValueId,
        name: str,
        *,
        tied_to: str | None = None,
        bias: bool = False,
        scale: float = 1.0,
        softcap: float = 0.0,
        kept: ValueId | None = None,
    ) -> None:
        """Append the logits: x times the matrix `name`, or the embedding `tied_to`.

        An embedding model gets the op `hidden` instead. Files may have the matrix `name` in any
        case: a copy of a tied embedding (loader/heads.py compares them), or a head without use.

        kept: the value with the hidden states that a head reads (see `Logits`).
        """
        width, vocab = self._width(x), self._spec.vocab
        if self._spec.pooled or tied_to is not None:
            self.leave([f"{name}.weight"])
        if self._spec.pooled:
            self.hidden(x)
            return
        weight = self._matrix(tied_to or name, vocab, width, use="head")
        shift = self._need(f"{name}.bias", (vocab,), "vector") if bias else None
        read = self._rotated(x, (weight,))
        kept = x if kept is None and read != x else kept
        self._ops.append(Logits(read, weight, vocab, width, scale, softcap, shift, kept))

    def hidden(self, x: ValueId) -> None:
        """Append the last op of an embedding model, which returns rows of x."""
        self._ops.append(Hidden(x, self._width(x)))


def _uses(use: Use | Literal["qkv"] | Sequence[Use], count: int) -> Sequence[Use]:
    """Return the use of each of `count` matrices of `DenseBuilder.linear`."""
    if not isinstance(use, str):
        return use
    if use != "qkv":
        return (use,) * count
    others: list[Use] = ["linear"] * (count - 1)
    return (*others, "values")


def gathers(to: Lowering, *weights: str) -> bool:
    """Return whether ops read rows of `weights` in mapped files: no op multiplies by `weights`."""
    found = looked_up(to.program)
    return all(weight in found and to.is_mapped(weight) for weight in weights)


def lookup_table(to: Lowering, weight: str, rows: int, width: int, gathered: bool) -> int:
    """Return the id of a native matrix that ops read single rows from.

    gathered: the rows stay in the mapped file; otherwise the matrix is packed.
    """
    if not gathered:
        return to.matrix((weight,), (rows,), width, False)
    if weight not in to.tables:
        to.tables[weight] = to.native.table(weight, to.kind_of(weight), rows, width)
        to.out.tables.append(TableLoad(to.tables[weight], weight))
    return to.tables[weight]


def looked_up(program: Program) -> frozenset[str]:
    """Return the matrices that ops read only single rows from, like untied embeddings."""
    found = {name for op in program.ops for name in op.looked_up()}
    for op in program.ops:
        if isinstance(op, Logits):
            found.discard(op.weight)
        elif isinstance(op, Linear):
            found.difference_update(op.weights)
    return frozenset(found)
