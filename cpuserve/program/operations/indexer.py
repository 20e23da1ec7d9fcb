"""Indexers (sparse attention of DeepSeek): they select the keys that attention reads.

An indexer stores a small index key of each token in its own layer of the KV cache. Its queries
score all index keys that a token sees. Attention reads only the keys and values of the tokens
with the highest scores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpuserve.base.errors import ModelError
from cpuserve.program.operations.attention import AttentionBuilder, check_rope
from cpuserve.program.operations.columns import Columns
from cpuserve.program.ops import Op, Rope, ValueId
from cpuserve.program.program import CacheLayer

if TYPE_CHECKING:
    from torch import Tensor

    from cpuserve.program.interpret import Interpreter
    from cpuserve.program.lower import Lowering

# The kernels read index keys in whole vectors.
INDEX_GROUP = 16
BLOCK = 32  # tokens of a KV block (kBlock in csrc); the tokens of a pool must be in one block


class StoreIndexKeys(Op, frozen=True):
    """Rotate the first dims of x [T, width], in place, and store the rows of x as index keys.

    rope: None = no rotation.
    interleaved: neighbouring dims of x are rotated as a pair. The rows get the first dims of all
      pairs, then the second dims.
    """

    write_of = "x"

    x: ValueId
    layer: int
    rope: Rope | None
    interleaved: bool = False

    def lower(self, to: Lowering) -> None:
        to.add(self, **to.rope(self.rope))

    def reference(self, at: Interpreter, x: Tensor) -> Tensor:
        import torch

        from cpuserve.program.reference.rows import rotate

        if self.interleaved and self.rope is not None:
            pairs, rest = x[:, : self.rope.rotary], x[:, self.rope.rotary :]
            x = torch.cat([pairs[:, ::2], pairs[:, 1::2], rest], dim=1)
        keys = x[:, None]
        if self.rope is not None:
            keys = rotate(keys, *at.turns(self.rope))
        at.store(self.layer, keys, keys)
        return keys[:, 0]


class PoolIndexKeys(Op, frozen=True):
    """Store the index keys of the pools that the tokens of the step complete.

    A pool is `pool` consecutive tokens. The rows of its tokens in the cache layer `layer` begin
    with a key of `width` columns. The index key of the pool is the mean of these keys.
    If there is a `norm`, the mean is normalized (RMS norm with the weight `norm` + 1).
    If there is a RoPE, it is then rotated by the angle of the first token.
    Cache layer `layer` + 1 stores the index key: token i has part i of `pool` equal parts.
    x is the value that was stored in `layer`, and does not change.
    Source: transformers modeling_glm5_next and modeling_qwen4_exp.

    ape: a weight [pool, width]. With ape, the mean is weighted in each column, by the softmax
      over the tokens of (gate + ape); the gate is the next `width` columns of a row.
    """

    write_of = "x"

    x: ValueId
    layer: int
    width: int
    pool: int
    ape: str | None = None
    norm: str | None = None
    eps: float = 1e-6
    rope: Rope | None = None

    def lower(self, to: Lowering) -> None:
        ape = -1
        if (name := self.ape) is not None:
            count = self.pool * self.width
            ape = to.vector(("flat", name), count, lambda read: read(name).reshape(-1))
        norm = to.norm_weight(self.norm, self.width, True)
        rope, last = to.rope(self.rope), self.layer + 1
        to.add(self, raw=self.layer, to=last, ape=ape, norm=norm, **rope)

    def reference(self, at: Interpreter, x: Tensor) -> Tensor:
        for seq in range(at.step.num_seqs):
            rows = at.positions[at.step.queries(seq)]
            first, end = int(rows[0]) // self.pool, (int(rows[-1]) + 1) // self.pool
            some = slice(first * self.pool, end * self.pool)
            stored = at.stored(self.layer, seq)[0][some, 0]
            keys = self._means(at, stored.reshape(end - first, self.pool, x.shape[1]), first)
            parts = keys.reshape(-1, 1, self.width // self.pool)
            at.store(self.layer + 1, parts, parts, at.slots_of(self.layer + 1, seq)[some])
        return x

    def _means(self, at: Interpreter, rows: Tensor, first: int) -> Tensor:
        """Return the index keys [n, width] of n pools, the first of them number `first`.

        rows: the rows of their tokens, [n, pool, columns].
        """
        import numpy as np

        from cpuserve.program.reference.rows import rms_norm, rotate

        keys = rows[..., : self.width]
        if self.ape is None:
            keys = keys.mean(dim=1)
        else:
            weights = (rows[..., self.width :] + at.vector(self.ape)).softmax(dim=1)
            keys = (weights * keys).sum(dim=1)
        if self.norm is not None:
            keys = rms_norm(keys, at.vector(self.norm) + 1, self.eps)
        if self.rope is not None:
            positions = np.arange(first, first + len(rows), dtype=np.int32) * self.pool
            keys = rotate(keys[:, None], *at.turns(self.rope, positions))[:, 0]
        return keys


class SelectKeys(Op, frozen=True):
    """Select the keys that attention reads: out [T, reads], positions in ascending order.

    q [T, heads * width or more], weights [T, heads] or None: all are 1.
    The score of an index key is the sum over heads of weights[:, h] * max(0, q_h . key).
    The `keep` index keys with the highest scores are selected; at equal scores, lower positions.
    A row of out with fewer positions ends with -1.
    Source: transformers modeling_deepseek_v32, modeling_glm5_next and modeling_qwen4_exp.

    pool: number of consecutive tokens that share an index key; each token stores a part of it.
      The tokens after the last whole pool are selected as well.
    """

    claimed = True

    q: ValueId
    weights: ValueId | None
    out: ValueId
    layer: int
    heads: int
    width: int
    keep: int
    pool: int = 1

    @property
    def reads_at_most(self) -> int:
        """The most tokens that a row of out selects; a row that sees fewer tokens selects all."""
        return self.keep * self.pool + self.pool - 1

    def reads(self) -> tuple[ValueId, ...]:
        """The queries, and the weights of heads if there are any."""
        return (self.q,) if self.weights is None else (self.q, self.weights)

    def lower(self, to: Lowering) -> None:
        to.out.cache_reads.append((self.layer, 0))
        to.add(self)

    def scores(
        self, at: Interpreter, seq: int, rows: slice, q: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        """Return the scores [rows, index keys] of sequence `seq`; -inf for keys that are not seen.

        rows: rows of the step that belong to the sequence; q and weights have all rows.
        """
        import torch

        stored, _, _ = at.stored(self.layer, seq)
        count = len(stored) // self.pool
        keys = stored[: count * self.pool].reshape(count, self.width)
        heads = q[rows, : self.heads * self.width].reshape(-1, self.heads, self.width)
        exact = self.pool > 1 or at.kv_type in ("f16", "f32")
        if at.mode == "emulated" and not exact:
            heads = heads.bfloat16().float()
        products = torch.einsum("nhd,kd->nhk", heads, keys).relu()
        scores = products.sum(dim=1)
        if weights is not None:
            scores = torch.einsum("nhk,nh->nk", products, weights[rows, : self.heads])
        seen = (torch.arange(count) + 1) * self.pool <= at.positions[rows, None] + 1
        return scores.masked_fill(~seen, -torch.inf)

    def reference(self, at: Interpreter, q: Tensor, weights: Tensor | None = None) -> Tensor:
        import torch

        from cpuserve.program.reference.attention import QUERIES_AT_ONCE

        out = torch.full((len(q), self.reads_at_most), -1.0)
        for seq in range(at.step.num_seqs):
            rows = at.step.queries(seq)
            for start in range(rows.start, rows.stop, QUERIES_AT_ONCE):
                some = slice(start, min(start + QUERIES_AT_ONCE, rows.stop))
                scores = self.scores(at, seq, some, q, weights)
                chosen = self._positions(scores, at.positions[some])
                out[some, : chosen.shape[1]] = chosen.float()
        return out

    def _positions(self, scores: Tensor, positions: Tensor) -> Tensor:
        """Return the selected positions [n, at most reads_at_most] in ascending order, then -1."""
        import torch

        best = scores.sort(dim=1, descending=True, stable=True).indices[:, : self.keep]
        known = scores.gather(1, best) > -torch.inf
        inside = torch.arange(self.pool)
        pools = (best[:, :, None] * self.pool + inside).masked_fill(~known[:, :, None], -1)
        tail = ((positions + 1) // self.pool * self.pool)[:, None] + inside[:-1]
        tail = tail.masked_fill(tail > positions[:, None], -1)
        chosen = torch.cat([pools.flatten(1), tail], dim=1)
        end = torch.iinfo(chosen.dtype).max
        chosen = chosen.masked_fill(chosen < 0, end).sort(dim=1).values
        return chosen.masked_fill(chosen == end, -1)


class IndexerBuilder(AttentionBuilder):
    """Appends the operations of indexers."""

    def store_index_keys(
        self, x: ValueId, *, rope: Rope | None = None, interleaved: bool = False
    ) -> int:
        """Rotate x [T, width] in place and store its rows as index keys; return the cache layer.

        interleaved: see `StoreIndexKeys`; queries must have the same order of dims.
        """
        width = self._width(x)
        if width % INDEX_GROUP:
            msg = f"index keys have {width} columns, but must have a multiple of {INDEX_GROUP}"
            raise ModelError(msg)
        if rope is not None:
            check_rope(rope, width)
        self._cache.append(CacheLayer(1, width, width, latent=True))
        layer = len(self._cache) - 1
        self._ops.append(StoreIndexKeys(x, layer, rope, interleaved))
        return layer

    def pool_index_keys(
        self,
        x: ValueId,
        *,
        layer: int,
        pool: int,
        ape: str | None = None,
        norm: str | None = None,
        eps: float | None = None,
        rope: Rope | None = None,
    ) -> int:
        """Store the index keys of pools of `pool` tokens; return the number of their cache layer.

        x: the value [T, width] that was stored in `layer`, the last cache layer so far;
          [T, 2 * width] with ape. For the other arguments see `PoolIndexKeys`.
        norm: the name of a norm, without ".weight".
        """
        width = self._width(x) // (1 if ape is None else 2)
        if width % INDEX_GROUP or width % pool or BLOCK % pool:
            msg = (
                f"index keys of {width} columns cannot be divided among pools of {pool} tokens: "
                f"both {width} and {BLOCK} must be multiples of {pool}"
            )
            raise ModelError(msg)
        if ape is not None:
            self._need(ape, (pool, width), "vector")
            joined = (op for op in self._ops if isinstance(op, Columns) and op.out == x)
            self._keep_exact(*(op.more for op in joined if op.more is not None))  # the gates
        if rope is not None:
            check_rope(rope, width)
        weight = self._need(f"{norm}.weight", (width,), "vector") if norm else None
        part = width // pool
        self._cache.append(CacheLayer(1, part, part, latent=True))
        more = (ape, weight, self._eps(eps), rope)
        self._ops.append(PoolIndexKeys(x, layer, width, pool, *more))
        return layer + 1

    def select_keys(
        self,
        q: ValueId,
        weights: ValueId | None,
        *,
        layer: int,
        heads: int,
        keep: int,
        pool: int = 1,
    ) -> ValueId:
        """Return the positions of the keys that attention reads: [T, (keep + 1) * pool - 1].

        q [T, heads * width or more] and weights [T, heads] (None = all are 1) score the index keys
        of the cache layer `layer`. The `keep` index keys with the highest scores are selected.
        A row with fewer positions ends with -1.

        pool: number of consecutive tokens that share an index key;
          the tokens after the last whole pool are selected as well.
        """
        width = self._cache[layer].key_width * pool
        self._check_columns(f"layer {layer}: index queries", q, 0, heads * width)
        if weights is not None:
            self._check_width(f"layer {layer}: index weights", weights, heads)
        out = self._value(f"layers.{layer}.selection", (keep + 1) * pool - 1)
        if weights is not None:
            self._keep_exact(weights)
        self._ops.append(SelectKeys(q, weights, out, layer, heads, width, keep, pool))
        return out
