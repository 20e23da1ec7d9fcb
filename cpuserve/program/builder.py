"""Builder: model files call its methods, once at load, to build their Program."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from cpuserve.config.cache_groups import STATE_CHUNK
from cpuserve.errors import ModelError
from cpuserve.program.adapters import SCALES, Adapters, name_a, name_b
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
    Groups,
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
    Score,
    ShortConv,
    SplitGates,
    Spread,
    Then,
    ValueId,
)
from cpuserve.program.program import (
    CacheLayer,
    Program,
    StateLayer,
    Value,
    WeightNeed,
    whole_lines,
)

# A unit of a recurrent layer is the part of a sequence for one thread: many enough for all threads
# to have some, and large enough that claiming one costs little.
CONV_CHANNELS = 256  # the most channels of a short convolution
STATE_HEADS = 8  # the most heads of Mamba2: the kernel reads as many states side by side
MOST_PARTS = 8  # of a row that MixParts mixes: csrc/runtime/program.h has their coefficients
# The kernels multiply heads by columns that begin and end at whole vectors.
HEAD_GROUP = 32


class Sizes(Protocol):
    """The hyperparameters that ops default to; models/spec.py has them."""

    @property
    def vocab(self) -> int:
        """Number of token ids."""

    @property
    def width(self) -> int:
        """Hidden size."""

    @property
    def q_heads(self) -> int:
        """Query heads."""

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""

    @property
    def head_dim(self) -> int:
        """Width of a head."""

    @property
    def norm_eps(self) -> float:
        """The epsilon of norms."""

    @property
    def adapters(self) -> Adapters | None:
        """The low-rank adapters that requests can name."""

    @property
    def pooled(self) -> bool:
        """Whether the model returns vectors instead of tokens."""


class Builder:
    """Appends ops, tracks the width of every value, and collects the weights that the ops read.

    Weights are named without their suffix: `b.linear(x, "model.layers.0.mlp.up_proj", ...)` reads
    "...up_proj.weight" and, with `bias`, "...up_proj.bias". Widths that do not match raise
    ModelError, because their cause is a wrong value in the model's config.
    """

    def __init__(self, spec: Sizes) -> None:
        self._spec = spec
        self._ops: list[Op] = []
        self._values: list[Value] = []
        self._weights: dict[str, WeightNeed] = {}
        self._cache: list[CacheLayer] = []
        self._states: list[StateLayer] = []
        self._unread: set[str] = set()
        self._adapters = spec.adapters
        self._adapted: ValueId | None = None  # the routing to adapters

    def embed(
        self, name: str, *, vocab: int | None = None, width: int | None = None, scale: float = 1.0
    ) -> ValueId:
        """scale * embedding rows of the tokens: [T, width]; vocab, width default to the spec."""
        vocab, width = vocab or self._spec.vocab, width or self._spec.width
        weight = self._matrix(name, vocab, width)
        out = self._value(name, width)
        self._ops.append(Embed(out, weight, vocab, width, scale))
        if self._adapters is not None and self._adapted is None:
            self._adapted = self._value("adapters", 2)
            count = self._adapters.count
            scales = self._need(SCALES, (count,), "vector")
            self._ops.append(RouteAdapters(self._adapted, count, scales))
        return out

    def position_embed(
        self,
        x: ValueId,
        name: str | None,
        *,
        rows: int,
        offset: int = 0,
        types: tuple[str, int] | None = None,
    ) -> None:
        """Add row (position + offset) of the learned positions [rows, width] to x, in place.

        types: the name of token types [their number, width]; row 0 is added as well, and
        alone if `name` is None.
        """
        width = self._width(x)
        weight = None if name is None else self._need(f"{name}.weight", (rows, width), "table")
        kinds = None
        if types is not None:
            kinds = self._need(f"{types[0]}.weight", (types[1], width), "table")
        self._ops.append(PositionEmbed(x, weight, rows, width, offset, kinds))

    def rms_norm(
        self,
        x: ValueId,
        name: str,
        *,
        eps: float | None = None,
        plus_one: bool = False,
        bare: bool = False,
        scale: float = 1.0,
    ) -> ValueId:
        """RmsNorm of every row: [T, width of x]; eps defaults to the spec.

        bare: the name of the weight is `name` alone.
        """
        width = self._width(x)
        weight = self._need(name if bare else f"{name}.weight", (width,), "vector")
        out = self._value(name, width)
        self._ops.append(RmsNorm(x, out, weight, width, self._eps(eps), plus_one, scale))
        return out

    def part_norm(
        self,
        x: ValueId,
        name: str | None,
        *,
        width: int,
        column: int = 0,
        parts: int = 1,
        eps: float | None = None,
    ) -> None:
        """RmsNorm of each of `parts` parts of x, `width` columns from `column` on; in place.

        name: None if it has no weight.
        """
        self._check_columns(f"{name or 'norm'}: x", x, column, parts * width)
        weight = None if name is None else self._need(f"{name}.weight", (width,), "vector")
        self._ops.append(PartNorm(x, weight, width, self._eps(eps), column, parts))

    def layer_norm(
        self, x: ValueId, name: str, *, eps: float | None = None, bias: bool = True
    ) -> ValueId:
        """LayerNorm of every row: [T, width of x]; eps defaults to the spec."""
        width = self._width(x)
        weight = self._need(f"{name}.weight", (width,), "vector")
        shift = self._need(f"{name}.bias", (width,), "vector") if bias else None
        out = self._value(name, width)
        self._ops.append(LayerNorm(x, out, weight, shift, width, self._eps(eps)))
        return out

    def linear(
        self,
        x: ValueId,
        names: str | Sequence[str],
        *,
        features: int | Sequence[int] | None = None,
        bias: bool | Sequence[bool] = False,
        then: Then = "none",
        add_to: ValueId | None = None,
    ) -> ValueId:
        """Multiply x by these concatenated matrices, add biases, apply activation `then`.

        Returns [T, sum(features)]. features: output columns of each matrix, or one number for all
        of them; a single matrix with `add_to` takes it from the width of that value. `then`
        "*_mul" needs two matrices (gate, up) of equal features and returns [T, features]. With
        `add_to` the result is added to that value, which is also returned.
        """
        parts = (names,) if isinstance(names, str) else tuple(names)
        label = _join(parts)
        if features is None:
            if add_to is None or len(parts) != 1:
                msg = f"linear {label}: features are not given; only add_to can replace them"
                raise ModelError(msg)
            features = self._width(add_to)
        sizes = (features,) * len(parts) if isinstance(features, int) else tuple(features)
        flags = (bias,) * len(parts) if isinstance(bias, bool) else tuple(bias)
        if not len(parts) == len(sizes) == len(flags):
            msg = (
                f"linear {label}: {len(parts)} matrices, {len(sizes)} features, {len(flags)} biases"
            )
            raise ModelError(msg)
        width = _then_width(f"linear {label}", sizes, then)
        k = self._width(x)
        weights = tuple(self._matrix(n, size, k) for n, size in zip(parts, sizes, strict=True))
        biases = tuple(
            self._need(f"{n}.bias", (size,), "vector") if flag else None
            for n, size, flag in zip(parts, sizes, flags, strict=True)
        )
        adapted = self._adapters is not None and not self._adapters.modules.isdisjoint(parts)
        # An adapter is added before the activation, which is then an op of its own.
        fused: Then = "none" if adapted else then
        if add_to is None:
            out = self._value(label, sum(sizes) if fused == "none" else width)
        else:
            out = add_to
            self._check_width(f"linear {label}: add_to", add_to, width)
        self._ops.append(Linear(x, out, weights, biases, sizes, k, fused, add_to is not None))
        if not adapted:
            return out
        self._add_adapters(x, parts, sizes, out)
        return out if then == "none" else self.activation(out, then)

    def _add_adapters(
        self, x: ValueId, modules: tuple[str, ...], sizes: Sequence[int], to: ValueId
    ) -> None:
        """Add scale * B A x of each row's adapter to the outputs of these modules, side by side."""
        routing, adapters = self._adapted, self._adapters
        if routing is None or adapters is None:
            msg = "adapters are routed by embed(), which must come first"
            raise ModelError(msg)
        label, width, total = _join(modules), self._width(x), sum(sizes)
        ranks = (adapters.rank,) * len(modules)
        a, b = [], []
        for i in range(adapters.count):
            a.append(tuple(self._need(name_a(m, i), (ranks[0], width), "matrix") for m in modules))
            b.append((self._need(name_b(modules, i), (total, sum(ranks)), "matrix"),))
        rows = self._value(f"{label} adapted rows", width)
        self._ops.append(Spread(x, routing, rows, width, 1))
        low = self._value(f"{label} low rank", sum(ranks))
        self._ops.append(ExpertLinear(rows, routing, low, tuple(a), ranks, width, 1))
        out = self._value(f"{label} adapters", total)
        self._ops.append(ExpertLinear(low, routing, out, tuple(b), (total,), sum(ranks), 1))
        self._ops.append(Combine(out, routing, to, total, 1))

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
        score: Score = "softmax",
        renormalize: bool = False,
        scale: float = 1.0,
        bias: str | None = None,
        groups: Groups | None = None,
        biased: bool = False,
        routed_by: ValueId | None = None,
        factors: str | None = None,
    ) -> ValueId:
        """Add a mixture of experts of h to the value `to`, and return that; None: make one.

        router: the matrix [experts, width of h] of the router, which multiplies `routed_by` (None:
        h). experts: the matrices of each expert: gate and up [features, width of h], then
        down [width of `to`, features]. bias, factors: weights [experts] by full name, added to the
        scores for the choice alone, and multiplied by the weights. groups: these groups of experts
        limit the choice. biased: the router and all matrices of experts have biases.
        """
        count, width = len(experts), self._width(h)
        if self._adapters is not None:
            msg = f"{router}: adapters of a mixture of experts are not supported"
            raise ModelError(msg)
        if not 1 <= chosen <= count:
            msg = f"{router}: {chosen} of {count} experts cannot be chosen for a token"
            raise ModelError(msg)
        if groups is not None:
            _check_groups(router, groups, count, chosen)
        logits = self.linear(
            h if routed_by is None else routed_by, router, features=count, bias=biased
        )
        routing = self._value(f"{router} routing", 2 * chosen)
        for name in filter(None, (bias, factors)):
            self._need(name, (count,), "vector")
        weights = (score, renormalize, scale, bias)
        self._ops.append(Route(logits, routing, count, chosen, *weights, groups, factors))
        rows = self._value(f"{router} rows", width, chosen)
        self._ops.append(Spread(h, routing, rows, width, chosen))
        gate_up, down = [names[:2] for names in experts], [names[2:] for names in experts]
        hidden = self._value(f"{router} hidden", features, chosen)
        self._expert_linear(rows, routing, hidden, gate_up, features, then, biased)
        out_width = width if to is None else self._width(to)
        out = self._value(f"{router} out", out_width, chosen)
        self._expert_linear(hidden, routing, out, down, out_width, "none", biased)
        total = self._value(f"{router} sum", out_width) if to is None else to
        self._ops.append(Combine(out, routing, total, out_width, chosen, to is not None))
        return total

    def _expert_linear(
        self,
        x: ValueId,
        routing: ValueId,
        out: ValueId,
        experts: Sequence[Sequence[str]],
        features: int,
        then: Then,
        biased: bool,
    ) -> None:
        """Multiply routed rows x by the matrices of their experts, of `features` outputs each."""
        k, sizes = self._width(x), (features,) * len(experts[0])
        _then_width(_join(tuple(experts[0])), sizes, then)
        weights = tuple(tuple(self._matrix(n, features, k) for n in names) for names in experts)
        biases = tuple(
            tuple(self._need(f"{n}.bias", (features,), "vector") for n in names)
            for names in (experts if biased else ())
        )
        chosen = self._values[x].copies
        self._ops.append(ExpertLinear(x, routing, out, weights, sizes, k, chosen, then, biases))

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
        stores: bool = True,
    ) -> None:
        """Normalize (optional) and rotate q and k of `qkv` in place; store k and v in the KV cache.

        qkv [T, (q_heads + 2 kv_heads) * head_dim], or wider. Call it for layers in order, starting
        at 0; layers without attention are not counted. heads: (kv_heads, head_dim) of the layer, if
        not as in the spec. stores False: qkv has queries alone, and they read the cache of an
        earlier `layer`.
        """
        q_heads = self._spec.q_heads
        kv_heads, d = heads or (self._spec.kv_heads, self._spec.head_dim)
        self._check_qkv(layer, qkv, (q_heads + (2 * kv_heads if stores else 0)) * d)
        if rope is not None:
            _check_rope(rope, d)
        if stores:
            self._check_layer(layer)
            self._cache.append(CacheLayer(kv_heads, d, d))
        elif layer >= len(self._cache) or self._cache[layer].key_width != d:
            msg = f"layer {layer}: no layer before it has stored heads of {d}"
            raise ModelError(msg)
        q_weight = self._need(f"{q_norm}.weight", (d,), "vector") if q_norm else None
        k_weight = self._need(f"{k_norm}.weight", (d,), "vector") if k_norm else None
        norms = (q_weight, k_weight, self._eps(eps), plus_one)
        self._ops.append(RopeStoreKV(qkv, layer, q_heads, kv_heads, d, rope, *norms, stores))

    def latent_attention(
        self,
        q: ValueId,
        kv: ValueId,
        kv_b: str | tuple[str, str],
        *,
        layer: int,
        nope: int,
        rope: Rope,
        values: int,
        norm: str,
        scale: float,
        eps: float | None = None,
        interleaved: bool = True,
    ) -> ValueId:
        """Attention over one compressed row of each token (MLA of DeepSeek): [T, q_heads * values].

        q [T, q_heads * (nope + rotary)]; kv [T, rank + rotary] is the token's row; its first rank
        columns are normalized with the weight `norm`. kv_b: the matrix [q_heads * (nope + values),
        rank] that makes keys and values of a row; or two of them, where the part of each head is
        [rank, nope] for keys (transposed) and [values, rank] for values. The part of the keys
        multiplies the queries instead, and the part of the values the result of attention, so rows
        stay compressed.
        """
        heads, rotary = self._spec.q_heads, rope.rotary
        self._check_width(f"layer {layer}: q", q, heads * (nope + rotary))
        rank = self._width(kv) - rotary
        for what, width in (("nope", nope), ("rank", rank)):
            # A product of a head reads its inputs rounded up, which must be the head's own.
            if width + -width % HEAD_GROUP > width + rotary:
                msg = (
                    f"layer {layer}: {what} is {width}, but must be a multiple of {HEAD_GROUP}, or "
                    f"at most the {rotary} rotated dims below one"
                )
                raise ModelError(msg)
        if self._adapters is not None and kv_b in self._adapters.modules:
            msg = f"{kv_b}: adapters of this matrix are not supported"
            raise ModelError(msg)
        self._check_layer(layer)
        _check_rope(rope, nope + rotary)
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
        self._ops.append(Attention(queries, rows, layer, heads, 1, width, scale))
        out = self._value(f"{at}.values", heads * values)
        self._ops.append(HeadLinear(rows, out, *of_values, values, rank, width))
        return out

    def _head_parts(
        self, kv_b: str | tuple[str, str], nope: int, values: int, rank: int
    ) -> tuple[tuple[str, int, int, int], tuple[str, int, int, int]]:
        """The matrices of keys and of values: name, heads, rows of a head, its first row."""
        heads = self._spec.q_heads
        if isinstance(kv_b, str):
            both = self._matrix(kv_b, heads * (nope + values), rank)
            return (both, heads, nope + values, 0), (both, heads, nope + values, nope)
        keys = self._matrix(kv_b[0], heads * rank, nope)
        return (keys, heads, rank, 0), (
            self._matrix(kv_b[1], heads * values, rank),
            heads,
            values,
            0,
        )

    def _check_layer(self, layer: int) -> None:
        if layer != len(self._cache):
            msg = f"layer {layer}: rope_store_kv of layer {len(self._cache)} is next; keep order"
            raise ModelError(msg)

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
    ) -> ValueId:
        """Causal attention of q over the cache of `layer`: [T, q_heads * head_dim].

        window: maximum number of visible keys (0 = all); scale: default head_dim ** -0.5; sinks:
        the full name of a weight [q_heads].
        """
        s = self._spec
        if layer >= len(self._cache):
            msg = f"layer {layer}: attention before rope_store_kv, which must come first"
            raise ModelError(msg)
        if sinks is not None:
            self._need(sinks, (s.q_heads,), "vector")
        cache = self._cache[layer]
        kv_heads, d = cache.heads, cache.key_width
        self._check_qkv(layer, qkv, s.q_heads * d)
        read = any(isinstance(op, Attention) and op.layer == layer for op in self._ops)
        if read and cache.window != window:
            msg = f"layer {layer}: its cache has a window of {cache.window}, not {window}"
            raise ModelError(msg)
        out = self._value(f"layers.{layer}.attention", s.q_heads * d)
        heads = (s.q_heads, kv_heads, d)
        scale = d**-0.5 if scale is None else scale
        self._ops.append(Attention(qkv, out, layer, *heads, scale, window, softcap, sinks, alibi))
        self._cache[layer] = replace(cache, window=window)
        return out

    def attend_both_sides(
        self,
        qkv: ValueId,
        *,
        rope: Rope | None = None,
        window: int = 0,
        scale: float | None = None,
        q_norm: str | None = None,
        k_norm: str | None = None,
        plus_one: bool = False,
    ) -> ValueId:
        """Attention of q to all keys of its sequence: [T, q_heads * head_dim].

        window: keys less than this far away, on both sides, are visible (0 = all). The other
        parameters are as in `rope_store_kv` and `attention`. All layers share one layer of the
        cache: a step has whole sequences, so a later one reads nothing of it.
        """
        s = self._spec
        d, label = s.head_dim, f"layers.{sum(isinstance(op, Attention) for op in self._ops)}"
        self._check_qkv(0, qkv, (s.q_heads + 2 * s.kv_heads) * d)
        if rope is not None:
            _check_rope(rope, d)
        if not self._cache:
            self._cache.append(CacheLayer(s.kv_heads, d, d))
        q_weight = self._need(f"{q_norm}.weight", (d,), "vector") if q_norm else None
        k_weight = self._need(f"{k_norm}.weight", (d,), "vector") if k_norm else None
        norms = (q_weight, k_weight, s.norm_eps, plus_one)
        heads = (s.q_heads, s.kv_heads, d)
        self._ops.append(RopeStoreKV(qkv, 0, s.q_heads, s.kv_heads, d, rope, *norms))
        out = self._value(f"{label}.attention", s.q_heads * d)
        scale = d**-0.5 if scale is None else scale
        self._ops.append(Attention(qkv, out, 0, *heads, scale, window, causal=False))
        return out

    def _check_qkv(self, layer: int, qkv: ValueId, least: int) -> None:
        value = self._values[qkv]
        if value.width < least:
            msg = f"layer {layer}: {value.name} is {value.width} wide, but qkv needs {least}"
            raise ModelError(msg)

    def split_gates(self, x: ValueId) -> ValueId:
        """Queries, keys and values of x, then its gates; a head of x has a query and a gate."""
        heads, head_dim, width = self._spec.q_heads, self._spec.head_dim, self._width(x)
        out = self._value(f"{self._values[x].name} sorted", width)
        self._ops.append(SplitGates(x, out, heads, head_dim, width))
        return out

    def multiply(self, x: ValueId, *, to: ValueId, column: int = 0) -> None:
        """Multiply `to` by the columns of x from `column` on; in place."""
        width = self._width(to)
        self._check_columns("multiply", x, column, width)
        self._ops.append(Gate(x, to, width, column, plain=True))

    def gate(self, x: ValueId, *, to: ValueId) -> None:
        """Multiply `to` by the sigmoid of the last columns of x; of its one column, if it has one.

        It works in place.
        """
        width, gates = self._width(to), self._width(x)
        if gates == 1:
            self._ops.append(Gate(x, to, width, single=True))
            return
        if gates < width:
            msg = f"gate: {self._values[x].name} has {gates} columns for {width} gates"
            raise ModelError(msg)
        self._ops.append(Gate(x, to, width, gates - width))

    def gated_delta(
        self,
        x: ValueId,
        gates: ValueId,
        name: str,
        *,
        key_heads: int,
        value_heads: int,
        key_width: int,
        value_width: int,
        taps: int,
        tiled: bool = False,
        eps: float | None = None,
    ) -> ValueId:
        """A gated delta net over x and its gates: [T, value_heads * value_width].

        The weights of layer `name` are conv1d.weight, A_log, dt_bias and norm.weight. See
        `ops.GatedDelta` for the columns of x and gates, and for `tiled`.
        """
        if value_heads % key_heads:
            msg = f"{name}: {value_heads} value heads cannot share {key_heads} key heads evenly"
            raise ModelError(msg)
        each = value_heads // key_heads
        channels = 2 * key_width + each * value_width
        wide = key_heads * (channels + each * value_width)
        self._check_width(f"{name}: x", x, wide)
        self._check_width(f"{name}: gates", gates, 2 * value_heads)
        out = self._value(name, value_heads * value_width)
        conv = self._need(f"{name}.conv1d.weight", (key_heads * channels, 1, taps), "table")
        a_log = self._need(f"{name}.A_log", (value_heads,), "vector")
        dt_bias = self._need(f"{name}.dt_bias", (value_heads,), "vector")
        norm = self._need(f"{name}.norm.weight", (value_width,), "vector")
        sizes = (key_heads, value_heads, key_width, value_width, taps)
        state = len(self._states)
        weights = (conv, a_log, dt_bias, norm)
        self._ops.append(GatedDelta(x, gates, out, state, *sizes, *weights, self._eps(eps), tiled))
        # A unit is a key head: the states of its value heads and the last inputs of its channels;
        # of every open token its key, each value head's u and decay, and its channels' inputs.
        closed = each * key_width * value_width + (taps - 1) * channels
        row = whole_lines(key_width) + each * (whole_lines(value_width) + 1) + channels
        self._states.append(StateLayer(key_heads, closed, STATE_CHUNK * row))
        return out

    def short_conv(
        self,
        x: ValueId,
        name: str,
        *,
        taps: int,
        column: int = 0,
        channels: int | None = None,
        bias: bool = False,
        silu: bool = False,
    ) -> ValueId:
        """A causal convolution of each column of x over `taps` tokens: [T, channels].

        The columns begin at `column`; channels: their number, by default all that follow.
        """
        channels = self._width(x) - column if channels is None else channels
        self._check_columns(f"{name}: x", x, column, channels)
        weight = self._need(f"{name}.weight", (channels, 1, taps), "table")
        shift = self._need(f"{name}.bias", (channels,), "vector") if bias else None
        out = self._value(name, channels)
        state, units = len(self._states), channels // largest_part(channels, CONV_CHANNELS)
        self._ops.append(
            ShortConv(x, out, state, channels, taps, weight, shift, column, units, silu)
        )
        # A unit keeps the last inputs of its channels, and the inputs of all open tokens.
        each = channels // units
        self._states.append(StateLayer(units, (taps - 1) * each, STATE_CHUNK * each))
        return out

    def mamba2(
        self,
        x: ValueId,
        steps: ValueId,
        name: str,
        *,
        heads: int,
        groups: int,
        key_width: int,
        value_width: int,
        column: int = 0,
        limits: tuple[float, float] = (0.0, math.inf),
    ) -> ValueId:
        """The state space of Mamba2 over x: [T, heads * value_width].

        The weights of layer `name` are A_log, dt_bias and D. See `ops.Mamba2` for the columns
        of x. steps: has a column of each head from `column` on; limits: of what becomes of it.
        """
        if heads % groups:
            msg = f"{name}: {heads} heads cannot form {groups} equal groups"
            raise ModelError(msg)
        self._check_width(f"{name}: x", x, heads * value_width + 2 * groups * key_width)
        self._check_columns(f"{name}: steps", steps, column, heads)
        a_log = self._need(f"{name}.A_log", (heads,), "vector")
        dt_bias = self._need(f"{name}.dt_bias", (heads,), "vector")
        d = self._need(f"{name}.D", (heads,), "vector")
        out, state = self._value(name, heads * value_width), len(self._states)
        each = largest_part(heads // groups, STATE_HEADS)
        sizes = (heads, groups, key_width, value_width, each, column)
        self._ops.append(Mamba2(x, steps, out, state, *sizes, a_log, dt_bias, d, *limits))
        # A unit keeps the states of some heads of a group; of every open token its B, and each
        # head's u and decay.
        row = whole_lines(key_width) + each * (whole_lines(value_width) + 1)
        closed = each * key_width * value_width
        self._states.append(StateLayer(heads // each, closed, STATE_CHUNK * row))
        return out

    def gated_norm(
        self,
        x: ValueId,
        z: ValueId,
        name: str,
        *,
        groups: int = 1,
        column: int = 0,
        eps: float | None = None,
    ) -> ValueId:
        """RmsNorm of x times the SiLU of the columns of z from `column` on: [T, width of x].

        Each of `groups` equal parts of a row has a mean of its own.
        """
        width = self._width(x)
        if width % groups:
            msg = f"{name}: {width} columns cannot form {groups} equal groups"
            raise ModelError(msg)
        self._check_columns(f"{name}: z", z, column, width)
        weight = self._need(f"{name}.weight", (width,), "vector")
        out = self._value(name, width)
        self._ops.append(GatedNorm(x, z, out, weight, width, groups, column, self._eps(eps)))
        return out

    def add(self, x: ValueId, *, to: ValueId, column: int | None = None) -> None:
        """Add x to `to`, or to its columns from `column` on; in place."""
        width = self._width(x)
        if column is None:
            self._check_width("add", to, width)
        self._check_columns("add", to, column or 0, width)
        self._ops.append(Add(x, to, width, column or 0))

    def scale(self, x: ValueId, name: str, *, by_column: bool = False) -> None:
        """Multiply x by the weight `name` [1], or [width of x] if `by_column`; in place."""
        width = self._width(x)
        weight = self._need(name, (width if by_column else 1,), "vector")
        self._ops.append(Scale(x, weight, width, by_column))

    def columns(
        self, x: ValueId, width: int, *, column: int = 0, more: ValueId | None = None
    ) -> ValueId:
        """A copy of `width` columns of x from `column` on, followed by a copy of `more`."""
        self._check_columns("columns", x, column, width)
        total = width + (0 if more is None else self._width(more))
        out = self._value("columns", total)
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
        """Add to each of `parts` equal parts of x what others have, or a target; in place.

        See `ops.MixParts`. name: the weight [parts * parts, width of gates], or, with a target,
        [parts, width of gates].
        """
        width, k = self._width(x) // max(parts, 1), self._width(gates)
        if not 1 <= parts <= MOST_PARTS or width * parts != self._width(x):
            msg = f"{name}: {self._width(x)} columns are not 1 to {MOST_PARTS} equal parts: {parts}"
            raise ModelError(msg)
        if target is not None:
            self._check_width(f"{name}: target", target, width)
        rows = parts * parts if target is None else parts
        weight = self._need(f"{name}.weight", (rows, k), "table")
        self._ops.append(MixParts(x, gates, weight, parts, width, k, target, active, scale))

    def match_rms(self, x: ValueId, *, like: ValueId, floor: float) -> None:
        """Scale each part of x, as wide as `like`, to its root mean square; in place.

        floor: the least that the mean square of a part counts as.
        """
        width = self._width(like)
        parts = max(self._width(x) // width, 1)
        self._check_width("match_rms", x, parts * width)
        self._ops.append(MatchRms(x, like, width, parts, floor))

    def keep_top(self, x: ValueId, *, width: int, deviations: float) -> None:
        """Subtract a cutoff from the first `width` columns of x, and set negatives to 0; in place.

        The cutoff is their mean plus that number of standard deviations.
        """
        self._check_columns("keep_top", x, 0, width)
        self._ops.append(KeepTop(x, width, deviations))

    def leave(self, names: Iterable[str]) -> None:
        """Tensors that checkpoints may have, although no op reads them."""
        self._unread.update(names)

    def activation(self, x: ValueId, then: Then) -> ValueId:
        """act(x); for "*_mul", act(first half of the columns) * (second half)."""
        width = self._width(x)
        if then.endswith("_mul"):
            if width % 2:
                msg = f"activation {then}: width {width} is odd, so it has no two halves"
                raise ModelError(msg)
            width //= 2
        out = self._value(then, width)
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
    ) -> None:
        """Logits over the vocabulary: x times the matrix `name`, or the embedding `tied_to`.

        The program of an embedding model ends with the rows of x instead.
        """
        width, vocab = self._width(x), self._spec.vocab
        if self._spec.pooled:
            self.hidden(x)
            return
        weight = self._matrix(tied_to or name, vocab, width)
        shift = self._need(f"{name}.bias", (vocab,), "vector") if bias else None
        self._ops.append(Logits(x, weight, vocab, width, scale, softcap, shift))

    def hidden(self, x: ValueId) -> None:
        """The rows of x as the source of embeddings; the last op of an encoder."""
        self._ops.append(Hidden(x, self._width(x)))

    def finish(self) -> Program:
        """The complete Program; ModelError unless its last op is its only Logits or Hidden op."""
        heads = [op for op in self._ops if isinstance(op, Logits | Hidden)]
        if len(heads) != 1 or self._ops[-1] is not heads[0]:
            msg = "a program must have one logits or hidden op, as its last op"
            raise ModelError(msg)
        attended = [op.layer for op in self._ops if isinstance(op, Attention)]
        if list(dict.fromkeys(attended)) != list(range(len(self._cache))):
            msg = (
                f"{len(self._cache)} layers are stored in the KV cache, but attention reads layers "
                f"{attended}; it must read every layer, in order"
            )
            raise ModelError(msg)
        return Program(
            ops=tuple(self._ops),
            values=tuple(self._values),
            weights=tuple(self._weights.values()),
            cache=tuple(self._cache),
            vocab=self._spec.vocab,
            width=self._spec.width,
            states=tuple(self._states),
            unread=frozenset(self._unread),
        )

    def _value(self, name: str, width: int, copies: int = 1) -> ValueId:
        out = ValueId(len(self._values))
        self._values.append(Value(out, name, width, copies))
        return out

    def _width(self, x: ValueId) -> int:
        return self._values[x].width

    def _check_width(self, what: str, x: ValueId, width: int) -> None:
        if self._width(x) != width:
            msg = f"{what}: {self._values[x].name} is {self._width(x)} wide, not {width}"
            raise ModelError(msg)

    def _check_columns(self, what: str, x: ValueId, column: int, count: int) -> None:
        if not 0 <= column <= self._width(x) - count or count < 1:
            have = f"{self._values[x].name} is {self._width(x)} wide"
            msg = f"{what}: {have}, so it has no {count} columns from column {column} on"
            raise ModelError(msg)

    def _eps(self, eps: float | None) -> float:
        return self._spec.norm_eps if eps is None else eps

    def _matrix(self, name: str, rows: int, columns: int) -> str:
        return self._need(f"{name}.weight", (rows, columns), "matrix")

    def _need(self, name: str, shape: tuple[int, ...], role: str) -> str:
        need = WeightNeed(name, shape, role)
        if self._weights.setdefault(name, need) != need:
            msg = f"two ops need {name} in different forms: {self._weights[name]} and {need}"
            raise ModelError(msg)
        return name


def largest_part(count: int, most: int) -> int:
    """The largest divisor of `count` that is at most `most`."""
    return next(part for part in range(min(count, most), 0, -1) if count % part == 0)


def _then_width(what: str, features: tuple[int, ...], then: Then) -> int:
    if not then.endswith("_mul"):
        return sum(features)
    if len(features) != 2 or features[0] != features[1]:
        msg = f"{what}: {then} needs two matrices of equal features, got {features}"
        raise ModelError(msg)
    return features[0]


def _check_groups(router: str, groups: Groups, experts: int, chosen: int) -> None:
    size = experts // groups.count
    fits = experts == size * groups.count and groups.best <= size
    if not fits or not 1 <= groups.kept <= groups.count or groups.kept * size < chosen:
        msg = (
            f"{router}: {chosen} of {experts} experts cannot be chosen from {groups.kept} of "
            f"{groups.count} groups"
        )
        raise ModelError(msg)


def _check_rope(rope: Rope, head_dim: int) -> None:
    if rope.rotary != 2 * len(rope.inv_freq) or not 0 < rope.rotary <= head_dim:
        msg = (
            f"rope: {rope.rotary} rotated dims need {rope.rotary // 2} frequencies (got "
            f"{len(rope.inv_freq)}) and at least as large a head_dim (got head_dim {head_dim})"
        )
        raise ModelError(msg)


def _join(names: tuple[str, ...]) -> str:
    """ "a.b.q_proj+k_proj" for ("a.b.q_proj", "a.b.k_proj")."""
    return "+".join((names[0], *(name.rpartition(".")[2] for name in names[1:])))
