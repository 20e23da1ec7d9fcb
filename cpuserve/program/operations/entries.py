"""Compressed attention (DeepSeek V4): tokens read entries of pools instead of their older tokens.

An entry is one row of the cache for a pool of consecutive tokens, a weighted mean of their rows.
The rows are kept for a window only. Attention reads entries, and the rows of its last tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cpuserve.base.errors import ModelError
from cpuserve.program.operations.attention import check_rope
from cpuserve.program.operations.indexer import BLOCK, INDEX_GROUP, StoreIndexKeys
from cpuserve.program.operations.latent import LatentBuilder
from cpuserve.program.ops import Op, Rope, ValueId
from cpuserve.program.program import CacheLayer

if TYPE_CHECKING:
    from torch import Tensor

    from cpuserve.program.interpret import Interpreter
    from cpuserve.program.lower import Lowering


def entry_parts(pool: int) -> int:
    """Return how many tokens store a part of an entry: the last ones of its pool."""
    return min(pool, BLOCK)


class PoolEntries(Op, frozen=True):
    """Store the entries of the pools that the tokens of the step complete.

    A pool is `pool` consecutive tokens. Each token has a key and a gate of `width` columns, in two
    cache layers from `raw` on. An entry is the mean of the keys of its pool, weighted in each
    column by the softmax over the tokens of (gate + ape). Then it is normalized (RMS norm with the
    weight `norm`), and its last dims are rotated by the angle of the pool's first token, each two
    neighbours as a pair. Cache layer `to` stores it: the last tokens of the pool have equal parts.
    x is the value that was stored in the last of the layers of keys and gates, and does not change.

    overlap: whether a token has a second key and gate, for the entry of the next pool. There are
      four cache layers then: keys for the next pool, keys, gates for the next pool, gates.
    ape: a weight [pool, width], or with `overlap` [pool, 2 * width], for the next pool first.
    Source: transformers modeling_deepseek_v4.
    """

    write_of = "x"

    x: ValueId
    raw: int
    to: int
    width: int
    pool: int
    overlap: bool
    ape: str
    norm: str
    eps: float
    rope: Rope

    @property
    def series(self) -> int:
        """Return how many keys a token has."""
        return 2 if self.overlap else 1

    @property
    def reads_layers(self) -> tuple[int, ...]:
        """The cache layers that the op reads."""
        return tuple(range(self.raw, self.raw + 2 * self.series))

    def lower(self, to: Lowering) -> None:
        name, count = self.ape, self.pool * self.series * self.width
        ape = to.vector(("flat", name), count, lambda read: read(name).reshape(-1))
        to.add(self, ape=ape, norm=to.plain(self.norm, self.width), **to.rope(self.rope))

    def reference(self, at: Interpreter, x: Tensor) -> Tensor:
        for seq in range(at.step.num_seqs):
            rows = at.positions[at.step.queries(seq)]
            first, end = int(rows[0]) // self.pool, (int(rows[-1]) + 1) // self.pool
            if first == end:
                continue
            entries = self._entries(at, seq, first, end)
            parts = entry_parts(self.pool)
            slots = at.slots_of(self.to, seq)[: end * self.pool].reshape(end, self.pool)
            split = entries.reshape(-1, 1, self.width // parts)
            at.store(self.to, split, split, slots[first:, -parts:].reshape(-1))
        return x

    def _entries(self, at: Interpreter, seq: int, first: int, end: int) -> Tensor:
        """Return entries [end - first, width] of a sequence."""
        import numpy as np
        import torch

        from cpuserve.program.reference.rows import rms_norm, rotate_neighbours

        begin = max(0, first - 1)  # older rows may be gone
        kept = slice(begin * self.pool, end * self.pool)
        layers = [at.stored(i, seq)[0][kept, 0] for i in self.reads_layers]
        pools = [x.reshape(end - begin, self.pool, self.width) for x in layers]
        ape = at.vector(self.ape).reshape(self.pool, self.series, self.width)
        keys = pools[: self.series]
        gates = [g + ape[:, i] for i, g in enumerate(pools[self.series :])]
        skipped = first - begin
        own_keys, own_gates = keys[-1][skipped:], gates[-1][skipped:]
        if self.overlap:
            none = torch.full((1 - skipped, self.pool, self.width), -torch.inf)
            before = slice(None, end - begin - 1)
            older_keys = torch.cat([torch.zeros_like(none), keys[0][before]])
            older_gates = torch.cat([none, gates[0][before]])
            own_keys = torch.cat([older_keys, own_keys], dim=1)
            own_gates = torch.cat([older_gates, own_gates], dim=1)
        found = (own_gates.softmax(dim=1) * own_keys).sum(dim=1)
        found = rms_norm(found, at.vector(self.norm), self.eps)
        positions = np.arange(first, end, dtype=np.int32) * self.pool
        return rotate_neighbours(found[:, None], *at.turns(self.rope, positions))[:, 0]


class EntryAttention(Op, frozen=True):
    """out = softmax(scale q k^T) k over entries, and the rows of the last `window` tokens.

    q, out [T, q_heads * head_dim]. Keys are also the values: all entries of complete pools in the
    cache layer `entries` (None = there are none), and then the rows in `layer`.
    selection: each query reads the entries of pools with these positions
      (`SelectKeys` with the same pools); positions after the last complete pool do not count.
    sinks: a weight [q_heads], one more logit in the softmax of each head.
    Source: transformers modeling_deepseek_v4.
    """

    claimed = True

    q: ValueId
    out: ValueId
    layer: int
    q_heads: int
    head_dim: int
    window: int
    scale: float
    sinks: str
    entries: int | None = None
    selection: ValueId | None = None
    pool: int = 1

    @property
    def reads_layers(self) -> tuple[int, ...]:
        """The cache layers that the op reads."""
        return (self.layer,) if self.entries is None else (self.entries, self.layer)

    def reads(self) -> tuple[ValueId, ...]:
        """The queries, and the selection of pools if there is one."""
        return (self.q,) if self.selection is None else (self.q, self.selection)

    def lower(self, to: Lowering) -> None:
        to.out.cache_reads += [(layer, 0) for layer in self.reads_layers[:-1]]
        to.out.cache_reads.append((self.layer, self.window))
        entries = -1 if self.entries is None else self.entries
        to.add(self, entries=entries, sinks=to.plain(self.sinks, self.q_heads))

    def reference(self, at: Interpreter, q: Tensor, selection: Tensor | None = None) -> Tensor:
        import torch

        out = torch.empty_like(q)
        for seq in range(at.step.num_seqs):
            rows, own = at.step.queries(seq), at.stored(self.layer, seq)[0][:, 0]
            entries = own[:0]
            if self.entries is not None:
                stored, parts = at.stored(self.entries, seq)[0][:, 0], entry_parts(self.pool)
                whole = len(stored) // self.pool
                pools = stored[: whole * self.pool].reshape(whole, self.pool, stored.shape[1])
                entries = pools[:, -parts:].reshape(whole, self.head_dim)
            for row in range(rows.start, rows.stop):
                position = int(at.positions[row])
                seen = entries[: (position + 1) // self.pool]
                if selection is not None:
                    chosen = selection[row][selection[row] >= 0].long() // self.pool
                    seen = seen[sorted(set(chosen[chosen < len(seen)].tolist()))]
                window = own[max(0, position - self.window + 1) : position + 1]
                out[row] = self._attend(at, q[row], torch.cat([seen, window]))
        return out

    def _attend(self, at: Interpreter, q: Tensor, keys: Tensor) -> Tensor:
        """Return the attention of one row of queries to `keys` [n, head_dim]."""
        import torch

        from cpuserve.program.reference.attention import chunked_softmax

        heads = q.reshape(1, self.q_heads, self.head_dim)
        rounded = at.mode == "emulated" and at.kv_type not in ("f16", "f32")
        if rounded:
            heads = heads.bfloat16().float()
        scores = torch.einsum("nhd,kd->nhk", heads, keys) * self.scale
        sink = at.vector(self.sinks)[:, None].expand(1, -1, 1)
        if at.mode == "emulated":
            values = keys[:, None].expand(-1, self.q_heads, -1)
            return chunked_softmax(scores, values, sink, round_p=rounded).reshape(-1)
        p = torch.softmax(torch.cat([scores, sink], dim=2), dim=2)[:, :, :-1]
        return torch.einsum("nhk,kd->nhd", p, keys).reshape(-1)


class EntriesBuilder(LatentBuilder):
    """Appends compressed attention."""

    def store_rows(self, x: ValueId, *, window: int) -> int:
        """Store the rows of x as keys and values, for the last `window` tokens; return the layer.

        window: how many tokens later tokens read.
        """
        width = self._width(x)
        if width % INDEX_GROUP:
            msg = f"rows have {width} columns, but must have a multiple of {INDEX_GROUP}"
            raise ModelError(msg)
        layer = self._add_rows(width, window)
        self._ops.append(StoreIndexKeys(x, layer, None))
        return layer

    def pool_entries(
        self,
        keys: list[ValueId],
        gates: list[ValueId],
        *,
        pool: int,
        window: int,
        ape: str,
        norm: str,
        rope: Rope,
        eps: float | None = None,
    ) -> int:
        """Store the entries of pools of `pool` tokens; return the number of their cache layer.

        keys, gates: values [T, width]; with two of each, the first are for the next pool.
        window: as in `store_rows`; an entry is made of no more tokens.
        ape: the full name of a weight. norm: the name of a norm, without ".weight".
        For the other arguments see `PoolEntries`.
        """
        width, series = self._width(keys[0]), len(keys)
        parts = entry_parts(pool)
        if (pool % BLOCK and BLOCK % pool) or width % parts or window < series * pool:
            msg = (
                f"entries of {width} columns cannot be divided among pools of {pool} tokens: the "
                f"pools must divide {BLOCK} or be a multiple of it, the columns a multiple of "
                f"{parts}, and the window of {window} tokens not shorter than {series} pools"
            )
            raise ModelError(msg)
        check_rope(rope, width)
        self._need(ape, (pool, series * width), "vector")
        weight = self._need(f"{norm}.weight", (width,), "vector")
        self._keep_exact(*gates)
        raw = [self.store_rows(x, window=window) for x in (*keys, *gates)]
        for layer in raw[1:]:  # the kernel reads one block table for all of them
            self._cache[layer] = replace(self._cache[layer], joined=True)
        to = self._add_rows(width // parts, 0)
        more = (series > 1, ape, weight, self._eps(eps), rope)
        self._ops.append(PoolEntries(gates[-1], raw[0], to, width, pool, *more))
        return to

    def entry_attention(
        self,
        q: ValueId,
        *,
        layer: int,
        window: int,
        scale: float,
        sinks: str,
        entries: int | None = None,
        pool: int = 1,
        selection: ValueId | None = None,
    ) -> ValueId:
        """Return the attention of q to entries and to the rows of `layer`; see `EntryAttention`.

        sinks: the full name of a weight.
        """
        heads, cache = self._spec.q_heads, self._cache[layer]
        width = heads * cache.key_width
        self._check_width(f"layer {layer}: queries", q, width)
        self._need(sinks, (heads,), "vector")
        out = self._value(f"layers.{layer}.attention", width)
        one = (q, out, layer, heads, cache.key_width, window, scale, sinks)
        self._ops.append(EntryAttention(*one, entries, selection, pool))
        return out

    def _add_rows(self, width: int, window: int) -> int:
        self._cache.append(CacheLayer(1, width, width, window, latent=True))
        return len(self._cache) - 1
