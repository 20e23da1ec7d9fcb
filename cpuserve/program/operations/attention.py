"""Attention, and the operation before it that stores keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cpuserve.base.errors import ModelError
from cpuserve.program.base_builder import BaseBuilder
from cpuserve.program.ops import Joined, Op, Rope, ValueId
from cpuserve.program.program import CacheLayer
from cpuserve.program.row_formats import WHOLE_ROW
from cpuserve.program.tables import alibi_slopes, query_scales

if TYPE_CHECKING:
    from torch import Tensor

    from cpuserve.program.interpret import Interpreter
    from cpuserve.program.lower import Lowering


class RopeStoreKV(Op, frozen=True):
    """Normalize (optional) and rotate q and k of `qkv` in place; store k and v in the KV cache.

    qkv: [T, (q_heads + 2 * kv_heads) * head_dim], with q first; columns after v do not change.
    q_norm, k_norm: RmsNorm weights [head_dim], applied to each head before the rotation (Qwen3).
      Several weights are parts in order.
    plus_one: the factors of the two norms are their weights plus 1 (Gemma 3).
    rope: None = no rotation (OPT).
    stores: False = `qkv` has only queries; an earlier op has stored keys and values.
    windowed: whether the sequences of the step are windows of pictures, from this op on; False =
      they are whole pictures (Program.partitions).
    """

    reads_of = ("qkv",)
    write_of = "qkv"

    qkv: ValueId
    layer: int
    q_heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None
    q_norm: Joined | None = None
    k_norm: Joined | None = None
    eps: float = 1e-6
    plus_one: bool = False
    stores: bool = True
    windowed: bool = False

    @property
    def num_axes(self) -> int:
        """Return the number of axes on which the tokens of a step may have places."""
        return max((() if self.rope is None else self.rope.axes), default=-1) + 1

    def lower(self, to: Lowering) -> None:
        import numpy as np

        to.add(
            self,
            q=to.take_queries(self.qkv, self.q_heads, self.head_dim),
            q_norm=to.norm_weight(self.q_norm, self.head_dim, self.plus_one),
            k_norm=to.norm_weight(self.k_norm, self.head_dim, self.plus_one),
            axes=np.array(() if self.rope is None else self.rope.axes, np.int32),
            **to.rope(self.rope),
        )

    def reference(self, at: Interpreter, qkv: Tensor) -> Tensor:
        import torch

        from cpuserve.program.reference.attention import MIXED_KV, mix, mix_width
        from cpuserve.program.reference.rows import rms_norm, rotate

        stored = 2 * self.kv_heads if self.stores else 0
        width = (self.q_heads + stored) * self.head_dim
        heads = qkv[:, :width].reshape(len(qkv), -1, self.head_dim)
        q, kv = heads[:, : self.q_heads], heads[:, self.q_heads :]
        k, v = kv.chunk(2, dim=1)
        more = 1 if self.plus_one else 0
        if self.q_norm is not None:
            q = rms_norm(q, at.vector(self.q_norm) + more, self.eps)
        if self.k_norm is not None:
            k = rms_norm(k, at.vector(self.k_norm) + more, self.eps)
        if self.rope is not None:
            cos, sin = at.turns(self.rope, axial=True)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if at.kv_type in MIXED_KV:
            q = mix(q) / mix_width(self.head_dim)
            k = mix(k) if self.stores else k
        if self.stores:
            at.store(self.layer, k, mix(v) if at.mixes_values(self.layer) else v)
        changed = torch.cat([q, k, v], dim=1).reshape(len(qkv), -1)
        return torch.cat([changed, qkv[:, width:]], dim=1)


class Attention(Op, frozen=True):
    """out = softmax(scale q k^T, causal) v over the layer's KV cache; reads the q part of `qkv`.

    out: [T, q_heads * head_dim].
    window: a query sees only keys less than `window` tokens away (0 = all keys).
    causal: False = a query also sees later keys, so a step must have whole sequences.
    selection: the positions of the keys that each query reads [T, keep] (`SelectKeys`). A query
      that sees at most `keep` keys reads all of them.
    softcap: a score s becomes softcap * tanh(s / softcap) (0 = no limit).
    sinks: a weight [q_heads], one more logit in the softmax of each head.
    alibi: whether the standard ALiBi biases for q_heads are added to the scores.
    spans: whether neighbouring tokens with rows of the media buffer, which are a picture, see each
      other in both directions. A window then limits only the keys before a query.
    sections: whether a query sees only keys of its own section: sections have `window` positions,
      a multiple of 256 (Llama 4).
    """

    reads_of = ("qkv",)
    claimed = True

    qkv: ValueId
    out: ValueId
    layer: int
    q_heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: str | None = None
    alibi: bool = False
    causal: bool = True
    selection: ValueId | None = None
    keep: int = 0
    spans: bool = False
    sections: bool = False

    def reads(self) -> tuple[ValueId, ...]:
        """The queries, and the selection of keys if there is one."""
        return (self.qkv,) if self.selection is None else (self.qkv, self.selection)

    def lower(self, to: Lowering) -> None:
        to.out.cache_reads.append((self.layer, self.keep or self.window))
        slopes = -1
        if self.alibi:
            slopes = to.vector(
                ("alibi", self.q_heads), self.q_heads, lambda _: alibi_slopes(self.q_heads)
            )
        q, _ = to.queries[self.qkv]
        to.add(self, q=q, slopes=slopes, sinks=to.plain(self.sinks, self.q_heads))

    def can_write(self, rows: str, to: Lowering) -> bool:
        """Return whether no scale of format `rows` covers two heads, written one after another."""
        crosses = rows.startswith("q8g32") and self.head_dim % 32 != 0
        return rows not in WHOLE_ROW and not crosses

    def reference(self, at: Interpreter, qkv: Tensor, selection: Tensor | None = None) -> Tensor:
        import torch

        from cpuserve.program.reference.attention import (
            QUERIES_AT_ONCE,
            ends_of_spans,
            mix,
            mix_width,
        )

        q = qkv[:, : self.q_heads * self.head_dim].reshape(len(qkv), self.q_heads, self.head_dim)
        out = torch.empty_like(q)
        two_way = self.spans and len(at.step.media_rows) > 0
        for seq in range(at.step.num_seqs):
            rows = at.step.queries(seq)
            k, v, v_scale = at.stored(self.layer, seq)
            if self.window:
                # Blocks before the window may have been freed.
                # Their content may be NaN, and 0 * NaN is NaN.
                first = max(0, len(k) - (rows.stop - rows.start) - self.window + 1)
                for read in (k, v) if v_scale is None else (k, v, v_scale):
                    read[:first] = 0.0
            ends = ends_of_spans(at.positions[rows], at.step.media_rows[rows]) if two_way else None
            stop = rows.stop
            if selection is not None:
                stop = rows.start + int((at.positions[rows] < self.keep).sum())
                for row in range(stop, rows.stop):
                    out[row] = self._attend_selected(at, q[row], k, v, selection[row], v_scale)
            for start in range(rows.start, stop, QUERIES_AT_ONCE):
                some = slice(start, min(start + QUERIES_AT_ONCE, stop))
                seen = None if ends is None else ends[start - rows.start :][: some.stop - start]
                out[some] = self._attend(at, q[some], k, v, at.positions[some], v_scale, seen)
        if at.mixes_values(self.layer):
            out = mix(out) / mix_width(self.head_dim)
        return out.reshape(len(qkv), -1)

    def _attend_selected(
        self,
        at: Interpreter,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        chosen: Tensor,
        v_scale: Tensor | None,
    ) -> Tensor:
        """Attention of one row q [Hq, d] to the keys at the positions `chosen`, ended by -1."""
        import torch

        keys = chosen[chosen >= 0].long()
        scale = None if v_scale is None else v_scale[keys]
        last = torch.tensor([len(keys) - 1])
        return self._attend(at, q[None], k[keys], v[keys], last, scale)[0]

    def _attend(
        self,
        at: Interpreter,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        v_scale: Tensor | None,
        ends: Tensor | None = None,
    ) -> Tensor:
        """Return the attention of one sequence for queries q [n, Hq, d] at `positions`.

        k, v: all keys and values of the sequence, [keys, Hk, d].
        v_scale [keys, Hk]: scales that v is still to be multiplied by (emulated mode).
        ends [n]: the position after the last key that each query sees; None = its own position.
        """
        import torch

        from cpuserve.program.reference.attention import chunked_softmax, visible
        from cpuserve.program.reference.rows import soften

        group = self.q_heads // self.kv_heads
        rounded = at.mode == "emulated" and at.kv_type not in ("f16", "f32")
        if rounded:
            q = q.bfloat16().float()
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        s = soften(torch.einsum("nhd,khd->nhk", q, k) * self.scale, self.softcap)
        distance = positions[:, None] - torch.arange(len(k))  # [n, keys], visible if >= 0
        if self.alibi:
            slopes = torch.from_numpy(alibi_slopes(self.q_heads))[:, None]
            s = s - slopes * distance[:, None].abs()
        window = 0 if self.sections else self.window
        seen = visible(distance, window, causal=self.causal)
        if self.sections:
            seen &= torch.arange(len(k)) // self.window == positions[:, None] // self.window
        if ends is not None:
            seen |= (distance < 0) & (torch.arange(len(k)) < ends[:, None])
        s = s.masked_fill(~seen[:, None], -torch.inf)
        sink = None
        if self.sinks is not None:
            sink = at.vector(self.sinks)[:, None].expand(len(q), -1, 1)
        if at.mode == "emulated":
            if v_scale is not None:
                v_scale = v_scale.repeat_interleave(group, dim=1)
            return chunked_softmax(s, v, sink, round_p=rounded, v_scale=v_scale)
        every = s if sink is None else torch.cat([s, sink], dim=2)
        p = torch.softmax(every, dim=2)[:, :, : s.shape[2]]
        return torch.einsum("nhk,khd->nhd", p, v)


class ScaleQueries(Op, frozen=True):
    """Multiply the first `width` columns of x, in place, by a factor that depends on the position.

    The factor is 1 + beta ln(1 + floor((position + ahead) / length)). It keeps the softmax of
    scores as sharp among many keys as among few (Ministral 3; in Llama 4 `ahead` is 1).
    """

    write_of = "x"

    x: ValueId
    width: int
    beta: float
    length: int
    ahead: int = 0

    def lower(self, to: Lowering) -> None:
        import numpy as np

        count, key = to.max_position, ("query scales", self.beta, self.length, self.ahead)
        positions = np.arange(self.ahead, count + self.ahead, dtype=np.int32)
        factors = to.vector(key, count, lambda _: query_scales(self.beta, self.length, positions))
        to.add(self, factors=factors)

    def reference(self, at: Interpreter, x: Tensor) -> Tensor:
        import torch

        factors = query_scales(self.beta, self.length, at.step.positions + self.ahead)
        out = x.clone()
        out[:, : self.width] *= torch.from_numpy(factors)[:, None]
        return out


class Rotate(Op, frozen=True):
    """Rotate the first `heads` heads of x, in place.

    paired: the last dims of each head are rotated, each two neighbours as a pair.
    Models with norms of q and k after the rotation use it (Hunyuan):
    their `RopeStoreKV` has the norms and no RoPE.
    """

    write_of = "x"

    x: ValueId
    heads: int
    head_dim: int
    rope: Rope
    paired: bool = False

    def lower(self, to: Lowering) -> None:
        to.add(self, **to.rope(self.rope))

    def reference(self, at: Interpreter, x: Tensor) -> Tensor:
        import torch

        from cpuserve.program.reference.rows import rotate, rotate_neighbours

        width, turn = self.heads * self.head_dim, rotate_neighbours if self.paired else rotate
        heads = x[:, :width].reshape(len(x), self.heads, self.head_dim)
        turned = turn(heads, *at.turns(self.rope)).reshape(len(x), -1)
        return torch.cat([turned, x[:, width:]], dim=1)


class SplitGates(Op, frozen=True):
    """Move the gates of the attention heads to the end of each row.

    The first columns of x [T, width] are `head_dim` queries and `head_dim` gates for each head.
    A row of out [T, width] has all queries, the other columns of x, and all gates.
    """

    x: ValueId
    out: ValueId
    heads: int
    head_dim: int
    width: int

    def reference(self, at: Interpreter, x: Tensor) -> Tensor:
        import torch

        width = 2 * self.heads * self.head_dim
        queries, gates = x[:, :width].reshape(len(x), self.heads, 2, self.head_dim).unbind(2)
        parts = queries.reshape(len(x), -1), x[:, width:], gates.reshape(len(x), -1)
        return torch.cat(parts, dim=1)


class ResizeHeads(Op, frozen=True):
    """Copy the first `begin` columns of x, and then `heads` heads of `from_width` columns.

    In out, these heads have `to_width` columns: the last ones are left out, or zeros are added.
    Models with narrower values than keys use it (MiMo V2).
    """

    x: ValueId
    out: ValueId
    begin: int
    heads: int
    from_width: int
    to_width: int

    def reference(self, at: Interpreter, x: Tensor) -> Tensor:
        import torch

        heads = x[:, self.begin :].reshape(len(x), self.heads, self.from_width)
        wider = torch.nn.functional.pad(heads, (0, self.to_width - self.from_width))
        return torch.cat([x[:, : self.begin], wider.reshape(len(x), -1)], dim=1)


class AttentionBuilder(BaseBuilder):
    """Appends attention over the KV cache."""

    def read_cache(self, heads: int, head_dim: int) -> None:
        """Append a KV cache that the program reads and another one fills (`stores=False`)."""
        self._cache.append(CacheLayer(heads, head_dim, head_dim))

    def rope_store_kv(
        self,
        qkv: ValueId,
        *,
        layer: int,
        rope: Rope | None,
        q_norm: str | None = None,
        k_norm: str | None = None,
        eps: float | None = None,
        plus_one: bool = False,
        heads: tuple[int, int] | None = None,
        q_heads: int | None = None,
        stores: bool = True,
    ) -> None:
        """Normalize (optional) and rotate q and k of `qkv` in place; store k and v in the KV cache.

        qkv [T, (q_heads + 2 kv_heads) * head_dim], or wider.
        Call this method for the layers in order, starting at 0;
        layers without attention are not counted.

        heads: (kv_heads, head_dim) of the layer, if they differ from the spec.
        q_heads: the number of query heads, if it differs from the spec.
        stores: False = qkv has only queries, which read the cache of the earlier layer `layer`.
        """
        q_heads = q_heads or self._spec.q_heads
        kv_heads, d = heads or (self._spec.kv_heads, self._spec.head_dim)
        self._check_qkv(layer, qkv, (q_heads + (2 * kv_heads if stores else 0)) * d)
        if rope is not None:
            check_rope(rope, d)
        if stores:
            self._check_layer(layer)
            self._cache.append(CacheLayer(kv_heads, d, d))
        elif layer >= len(self._cache) or self._cache[layer].key_width != d:
            msg = f"layer {layer}: no layer before it has stored heads of {d}"
            raise ModelError(msg)
        norms = (self._head_norm(q_norm, d), self._head_norm(k_norm, d), self._eps(eps), plus_one)
        self._ops.append(RopeStoreKV(qkv, layer, q_heads, kv_heads, d, rope, *norms, stores))

    def attention(
        self,
        qkv: ValueId,
        *,
        layer: int,
        window: int = 0,
        scale: float | None = None,
        softcap: float = 0.0,
        sinks: str | None = None,
        alibi: bool = False,
        q_heads: int | None = None,
        selection: ValueId | None = None,
        sections: bool = False,
    ) -> ValueId:
        """Return the causal attention of q over the cache of `layer`: [T, q_heads * head_dim].

        window: maximum number of keys that a query sees (0 = all).
        scale: factor of the scores; by default head_dim ** -0.5.
        sinks: the full name of a weight [q_heads].
        alibi: whether a score falls with the distance of its key, by the slope of its head.
        q_heads: the number of query heads, by default as in the spec.
        selection: the keys that each query reads (`select_keys`); None = all that it sees.
        sections: whether the window begins at the last multiple of `window` (`Attention`).
        """
        q_heads = q_heads or self._spec.q_heads
        if layer >= len(self._cache):
            msg = f"layer {layer}: attention before rope_store_kv, which must come first"
            raise ModelError(msg)
        if sinks is not None:
            self._need(sinks, (q_heads,), "vector")
        cache = self._cache[layer]
        kv_heads, d = cache.heads, cache.key_width
        self._check_qkv(layer, qkv, q_heads * d)
        read = any(isinstance(op, Attention) and op.layer == layer for op in self._ops)
        if read and cache.window != window:
            msg = f"layer {layer}: its cache has a window of {cache.window}, not {window}"
            raise ModelError(msg)
        out = self._value(f"layers.{layer}.attention", q_heads * d)
        attention = Attention(
            qkv,
            out,
            layer,
            q_heads,
            kv_heads,
            d,
            d**-0.5 if scale is None else scale,
            window,
            softcap,
            sinks,
            alibi,
            selection=selection,
            keep=0 if selection is None else self._width(selection),
            spans=self._spec.sees_whole_pictures(window),
            sections=sections,
        )
        self._ops.append(attention)
        self._cache[layer] = replace(cache, window=window)
        return out

    def attend_both_sides(
        self,
        qkv: ValueId,
        *,
        rope: Rope | None = None,
        window: int = 0,
        scale: float | None = None,
        q_norm: Joined | None = None,
        k_norm: Joined | None = None,
        plus_one: bool = False,
        windowed: bool = False,
        alibi: bool = False,
    ) -> ValueId:
        """Return the attention of q to all keys of its sequence: [T, q_heads * head_dim].

        All layers share one layer of the cache:
        a step has whole sequences, so later layers and steps never read these keys.

        window: a query sees keys less than this many tokens away, on both sides (0 = all).
        windowed: the sequences are windows of pictures, not whole pictures (TowerSpec.window).
        q_norm, k_norm: norms, or equal parts of each of them, in order.
        For the other parameters see `rope_store_kv` and `attention`.
        """
        s = self._spec
        d, label = s.head_dim, f"layers.{sum(isinstance(op, Attention) for op in self._ops)}"
        self._check_qkv(0, qkv, (s.q_heads + 2 * s.kv_heads) * d)
        if rope is not None:
            check_rope(rope, d)
        if not self._cache:
            self._cache.append(CacheLayer(s.kv_heads, d, d))
        norms = (self._head_norm(q_norm, d), self._head_norm(k_norm, d), s.norm_eps, plus_one)
        heads = (s.q_heads, s.kv_heads, d)
        store = RopeStoreKV(qkv, 0, s.q_heads, s.kv_heads, d, rope, *norms, True, windowed)
        self._ops.append(store)
        out = self._value(f"{label}.attention", s.q_heads * d)
        scale = d**-0.5 if scale is None else scale
        attention = Attention(qkv, out, 0, *heads, scale, window, alibi=alibi, causal=False)
        self._ops.append(attention)
        return out

    def scale_queries(
        self, x: ValueId, width: int, *, beta: float, length: int, ahead: int = 0
    ) -> None:
        """Multiply `width` columns of x, in place, by the factor of `ScaleQueries`."""
        self._check_columns("scale_queries: x", x, 0, width)
        self._ops.append(ScaleQueries(x, width, beta, length, ahead))

    def rotate(
        self,
        x: ValueId,
        *,
        heads: int,
        rope: Rope,
        head_dim: int | None = None,
        paired: bool = False,
    ) -> None:
        """Rotate the first `heads` heads of x, in place; for `paired` see `Rotate`.

        head_dim: by default as in the spec.
        """
        d = head_dim or self._spec.head_dim
        self._check_columns("rotate: x", x, 0, heads * d)
        check_rope(rope, d)
        self._ops.append(Rotate(x, heads, d, rope, paired))

    def resize_heads(self, x: ValueId, *, heads: int, begin: int, to: int) -> ValueId:
        """Return x with `to` columns for each of `heads` heads from column `begin` on."""
        columns = self._width(x) - begin
        self._check_columns("resize_heads: x", x, begin, columns)
        out = self._value(f"{self._values[x].name} resized", begin + heads * to)
        self._ops.append(ResizeHeads(x, out, begin, heads, columns // heads, to))
        return out

    def split_gates(self, x: ValueId) -> ValueId:
        """Return x with all gates at the end of each row.

        In x, the gate of each head follows its query.
        """
        heads, head_dim, width = self._spec.q_heads, self._spec.head_dim, self._width(x)
        out = self._value(f"{self._values[x].name} sorted", width)
        self._ops.append(SplitGates(x, out, heads, head_dim, width))
        return out

    def _head_norm(self, name: Joined | None, width: int) -> Joined | None:
        if not isinstance(name, tuple):
            return self._need(f"{name}.weight", (width,), "vector") if name else None
        part = width // len(name)
        return tuple(self._need(f"{each}.weight", (part,), "vector") for each in name)

    def _check_layer(self, layer: int) -> None:
        if layer != len(self._cache):
            msg = f"layer {layer}: rope_store_kv of layer {len(self._cache)} is next; keep order"
            raise ModelError(msg)

    def _check_qkv(self, layer: int, qkv: ValueId, least: int) -> None:
        value = self._values[qkv]
        if value.width < least:
            msg = f"layer {layer}: {value.name} is {value.width} wide, but qkv needs {least}"
            raise ModelError(msg)


def check_rope(rope: Rope, head_dim: int) -> None:
    if rope.rotary != 2 * len(rope.inv_freq) or not 0 < rope.rotary <= head_dim:
        msg = (
            f"rope: {rope.rotary} rotated dims need {rope.rotary // 2} frequencies (got "
            f"{len(rope.inv_freq)}) and at least as large a head_dim (got head_dim {head_dim})"
        )
        raise ModelError(msg)
    if rope.axes and len(rope.axes) != len(rope.inv_freq):
        msg = f"rope: {len(rope.axes)} axes for {len(rope.inv_freq)} frequencies"
        raise ModelError(msg)
