"""Latent attention (MLA of DeepSeek): the cache has one compressed row per token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpuserve.base.errors import ModelError
from cpuserve.program.loads import HeadPart, MatrixLoad, OpWeights
from cpuserve.program.operations.attention import Attention, check_rope
from cpuserve.program.operations.indexer import IndexerBuilder
from cpuserve.program.ops import Op, Rope, ValueId
from cpuserve.program.program import CacheLayer
from cpuserve.program.row_formats import ACT_FORMAT, FLOAT_ROWS

if TYPE_CHECKING:
    from torch import Tensor

    from cpuserve.program.interpret import Interpreter
    from cpuserve.program.lower import Lowering

# The kernels read the columns of a head in groups of this many columns (whole vectors).
HEAD_GROUP = 32


class HeadLinear(Op, frozen=True):
    """Multiply each head of x by its own part of a matrix: out [T, heads * features].

    Head h reads in_features columns of x, from column h * step on.
    Its part of `weight` [heads * rows, columns] begins at row h * rows + first.
    The part is [in_features, features] if `transposed`, else [features, in_features].
    The parts are not quantized.
    """

    claimed = True

    x: ValueId
    out: ValueId
    weight: str
    heads: int
    rows: int
    first: int
    features: int
    in_features: int
    step: int
    transposed: bool = False

    def lower(self, to: Lowering) -> None:
        kind, n, k = self._kind(to), self.features, self.in_features
        matrices = []
        for h in range(self.heads):
            begin = h * self.rows + self.first
            part = HeadPart(slice(begin, begin + (k if self.transposed else n)), self.transposed)
            name = f"{self.weight} {part.rows.start}"
            matrices.append(to.native.matrix(name, kind, n, k, [n], False))
            to.out.matrices.append(MatrixLoad(matrices[-1], (self.weight,), part))
        x = to.stored_as(self.x, ACT_FORMAT[kind])
        size = self.heads * to.native.packed_bytes(kind, n, k)
        read = OpWeights(kind, self.heads * n, k, size)
        to.out.read_bytes += read.num_bytes
        to.out.linear_weights += read.n * read.k
        to.add(self, read=read, x=x, matrices=matrices)

    def _kind(self, to: Lowering) -> str:
        """Return the weight kind of the parts. It is dense: a part of a row has no scale."""
        kind = to.kind_of(self.weight)
        return kind if kind.startswith("dense") else "dense_bf16"

    def read_formats(self, value: ValueId, to: Lowering) -> set[str]:
        """Return the row format that the parts need for x; f32 for other values."""
        return {ACT_FORMAT[self._kind(to)]} if value == self.x else {"f32"}

    def can_write(self, rows: str, to: Lowering) -> bool:
        """Return whether `rows` is a float format and a head has whole groups of 32 columns."""
        return not rows.startswith("q8") and self.features % 32 == 0

    def reference(self, at: Interpreter, x: Tensor) -> Tensor:
        import torch

        from cpuserve.program.reference.quantized import QuantMatrix

        weight = at.matrix(self.weight)
        if at.mode == "emulated" and at.kinds.get(self.weight, "dense_f32") not in FLOAT_ROWS:
            x = x.bfloat16().float()
        out = []
        for h in range(self.heads):
            begin = h * self.rows + self.first
            where = slice(begin, begin + (self.in_features if self.transposed else self.features))
            w = weight.rows(where) if isinstance(weight, QuantMatrix) else weight[where].float()
            if isinstance(weight, QuantMatrix) and at.mode == "emulated":
                w = w.bfloat16().float()
            part = x[:, h * self.step :][:, : self.in_features]
            out.append(part @ (w if self.transposed else w.T))
        return torch.cat(out, dim=1)


class LatentStoreKV(Op, frozen=True):
    """Store one compressed row of each token, and make queries for it (MLA of DeepSeek).

    kv [T, rank + rotary] becomes the row:
    its first `rank` columns are normalized (RmsNorm with weight `norm`),
    and its last `rotary` columns are rotated. The row is key and value of the only KV head.
    In q [T, q_heads * (nope + rotary)], the last `rotary` columns of each head are rotated,
    and `latent` [T, q_heads * rank] replaces the first `nope` columns (see HeadLinear).
    out: the queries [T, q_heads * (rank + rotary)].
    interleaved: neighbouring dims are rotated as a pair;
    the result has the first dims of all pairs before the second dims.
    If `rotary` is 0, nothing is rotated.
    """

    reads_of = ("q", "latent", "kv")

    q: ValueId
    latent: ValueId
    kv: ValueId
    out: ValueId
    layer: int
    q_heads: int
    nope: int
    rank: int
    rope: Rope
    norm: str
    eps: float
    interleaved: bool = True

    @property
    def head_dim(self) -> int:
        """Return the width of a stored row, which is also the width of a query."""
        return self.rank + self.rope.rotary

    def lower(self, to: Lowering) -> None:
        q = to.take_queries(self.out, self.q_heads, self.head_dim)
        to.add(self, out=q, norm=to.plain(self.norm, self.rank), **to.rope(self.rope))

    def reference(self, at: Interpreter, q: Tensor, latent: Tensor, kv: Tensor) -> Tensor:
        import torch

        from cpuserve.program.reference.rows import rms_norm, rotate

        row = rms_norm(kv[:, : self.rank], at.vector(self.norm), self.eps)
        cos, sin = at.turns(self.rope)
        turned = []
        for x in (q.reshape(len(q), self.q_heads, -1)[:, :, self.nope :], kv[:, None, self.rank :]):
            pairs = torch.cat([x[..., ::2], x[..., 1::2]], dim=-1) if self.interleaved else x
            turned.append(rotate(pairs, cos, sin))
        k = torch.cat([row[:, None], turned[1]], dim=2)
        at.store(self.layer, k, k)
        absorbed = latent.reshape(len(q), self.q_heads, self.rank)
        return torch.cat([absorbed, turned[0]], dim=2).reshape(len(q), -1)


def _check_head(what: str, width: int, rotary: int) -> None:
    """Raise ModelError unless a kernel can read the first `width` columns of a head.

    The kernel reads groups of HEAD_GROUP columns, and the head has `width` + `rotary` columns.
    All columns of the last group must belong to the head.
    """
    if width + -width % HEAD_GROUP > width + rotary:
        msg = (
            f"{what} is {width}, but must be a multiple of {HEAD_GROUP}, or at most the {rotary} "
            f"rotated dims below one"
        )
        raise ModelError(msg)


class LatentBuilder(IndexerBuilder):
    """Appends attention over compressed rows."""

    def latent_attention(
        self,
        q: ValueId,
        kv: ValueId,
        kv_b: str | tuple[str, str],
        *,
        nope: int,
        rope: Rope,
        values: int,
        norm: str,
        scale: float,
        eps: float | None = None,
        interleaved: bool = True,
        selection: ValueId | None = None,
        sinks: str | None = None,
    ) -> ValueId:
        """Return attention over one compressed row of each token (MLA): [T, q_heads * values].

        q [T, q_heads * (nope + rotary)]. kv [T, rank + rotary] is the row of each token;
        its first `rank` columns are normalized with the weight `norm`.

        kv_b: the matrix [q_heads * (nope + values), rank] that makes keys and values from a row;
          or two matrices with a part for each head:
          [rank, nope] for keys (transposed), [values, rank] for values.
        selection: the keys that each token reads (`select_keys`); None = all that it sees.
        sinks: the full name of a weight [q_heads] (see `Attention`).

        Cached rows stay compressed: the part of kv_b for keys multiplies the queries,
        and the part for values multiplies the result of attention.
        """
        heads, rotary, layer = self._spec.q_heads, rope.rotary, len(self._cache)
        self._check_width(f"layer {layer}: q", q, heads * (nope + rotary))
        rank = self._width(kv) - rotary
        _check_head(f"layer {layer}: nope", nope, rotary)
        _check_head(f"layer {layer}: rank", rank, rotary)
        if rotary:
            check_rope(rope, nope + rotary)
        of_keys, of_values = self._head_parts(kv_b, nope, values, rank)
        gain = self._need(f"{norm}.weight", (rank,), "vector")
        at = f"layers.{layer}"
        latent = self._value(f"{at}.latent_queries", heads * rank)
        transposed = isinstance(kv_b, str)
        each = (rank, nope, nope + rotary, transposed)
        self._ops.append(HeadLinear(q, latent, *of_keys, *each))
        queries = self._value(f"{at}.queries", heads * (rank + rotary))
        sizes = (layer, heads, nope, rank)
        store = LatentStoreKV(
            q, latent, kv, queries, *sizes, rope, gain, self._eps(eps), interleaved
        )
        self._ops.append(store)
        width = store.head_dim
        self._cache.append(CacheLayer(1, width, width, latent=True))
        rows = self._value(f"{at}.attention", heads * width)
        sink = None if sinks is None else self._need(sinks, (heads,), "vector")
        keep = 0 if selection is None else self._width(selection)
        one = (queries, rows, layer, heads, 1, width, scale)
        self._ops.append(Attention(*one, sinks=sink, selection=selection, keep=keep))
        out = self._value(f"{at}.values", heads * values)
        self._ops.append(HeadLinear(rows, out, *of_values, values, rank, width))
        return out

    def head_linear(self, x: ValueId, name: str, *, heads: int, features: int) -> ValueId:
        """Return the product of each of `heads` equal parts of x with a matrix of its own.

        name: the name of a matrix [heads * features, columns of a part]; its parts are in order.
        """
        width = self._width(x) // heads
        self._check_width(name, x, heads * width)
        weight = self._matrix(name, heads * features, width, use="exact")
        out = self._value(name, heads * features)
        self._ops.append(HeadLinear(x, out, weight, heads, features, 0, features, width, width))
        return out

    def _head_parts(
        self, kv_b: str | tuple[str, str], nope: int, values: int, rank: int
    ) -> tuple[tuple[str, int, int, int], tuple[str, int, int, int]]:
        """Return (matrix, heads, rows of a head, first used row of a head) for keys and values."""
        heads = self._spec.q_heads
        if self._adapters is not None and kv_b in self._adapters.modules:
            msg = f"{kv_b}: adapters of this matrix are not supported"
            raise ModelError(msg)
        if isinstance(kv_b, str):
            both = self._matrix(kv_b, heads * (nope + values), rank, use="exact")
            return (both, heads, nope + values, 0), (both, heads, nope + values, nope)
        keys = self._matrix(kv_b[0], heads * rank, nope)
        return (keys, heads, rank, 0), (
            self._matrix(kv_b[1], heads * values, rank),
            heads,
            values,
            0,
        )
