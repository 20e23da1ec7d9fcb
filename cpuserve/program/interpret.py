"""Runs a Program in torch, one small function per op: the reference for kernels and executors.

There are two modes. "reference" computes everything in fp32. "emulated" rounds and quantizes at the
same points as the native executor (csrc/kernels/table.h), so tests can use tight tolerances.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from cpuserve.program.dataflow import last_uses, reads, written
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
    ValueId,
)
from cpuserve.program.parts import parse
from cpuserve.program.program import CacheLayer, Program, group_of
from cpuserve.program.reference.attention import (
    BLOCK,
    FP8,
    KV_DTYPES,
    MIXED_KV,
    QUERIES_AT_ONCE,
    SCALED_KV,
    chunked_softmax,
    encode_kv,
    mix,
    mix_width,
    visible,
)
from cpuserve.program.reference.mamba import ConvInputs, Mamba2Sizes, Mamba2States, Mamba2Weights
from cpuserve.program.reference.quantized import (
    GROUP128,
    GROUP256,
    Matrix,
    QuantMatrix,
    multiply_channel,
    multiply_grouped,
    multiply_two_terms,
    row_blocks,
)
from cpuserve.program.reference.recurrent import (
    DeltaSizes,
    DeltaStates,
    DeltaWeights,
    Part,
    parts_of,
)
from cpuserve.program.reference.rows import activate, rms_norm, rotate, soften
from cpuserve.program.row_formats import ACT_FORMAT, FLOAT_ROWS
from cpuserve.program.tables import alibi_slopes, rope_tables
from cpuserve.program.view import (
    HasWords,
    KeptTables,
    StepView,
    check_step,
    key_slots,
    token_slots,
    view,
)

Mode = Literal["reference", "emulated"]

DENSE_DTYPES = {
    "dense_f32": torch.float32,
    "dense_f16": torch.float16,
    "dense_bf16": torch.bfloat16,
}


def _tensor(tensors: Mapping[str, Matrix], name: str) -> Matrix:
    """The tensor `name`, or the rows of one of `tensors` that the name denotes."""
    part = None if name in tensors else parse(name)
    if part is None:
        return tensors[name]
    whole = tensors[part.tensor]
    assert isinstance(whole, Tensor), "quantized parts are given as tensors of their own"
    matrix = whole if part.index is None else whole[part.index]
    matrix = matrix.mT if part.columns and matrix.ndim > 1 else matrix
    return matrix[part.first : part.end : part.step]


class Interpreter:
    """Runs a Program over packed steps, with its own paged KV cache.

    tensors: every weight of the program under its checkpoint name, as a torch tensor or, for
    quantized kinds in the emulated mode, a QuantMatrix. kinds: weight kind of each matrix in the
    emulated mode (default dense_f32). kv_dtype: storage of keys and values in both modes: "f32",
    "f16", "bf16", or "int8", "fp8_e4m3", "fp8_e5m2" with one scale per token and head. The cache
    has `num_blocks` blocks of 32 tokens, and `num_states` slots for states of recurrent layers.
    long_rope: LongRoPE turns by its frequencies of long sequences. Any thread may set `cancelled`,
    which ends a run after its current op with RuntimeError.
    """

    def __init__(
        self,
        program: Program,
        tensors: Mapping[str, Matrix],
        *,
        mode: Mode = "reference",
        kinds: Mapping[str, str] | None = None,
        kv_dtype: str = "f32",
        num_blocks: int = 64,
        activation_bits: int = 8,
        groups: Sequence[Sequence[int]] = (),
        num_states: int = 0,
        long_rope: bool = False,
    ) -> None:
        self.program = program
        self._long_rope = long_rope
        self._kv_groups = len(groups) or 1
        self._groups = self._kv_groups + bool(program.states)
        self._num_states = num_states
        self._group_of = group_of(program, groups)
        self.cancelled = False
        self.mode = mode
        self.num_blocks = num_blocks
        self.kinds = dict(kinds or {}) if mode == "emulated" else {}
        self.kv_type = kv_dtype
        self.activation_bits = activation_bits
        self._kv_scaled = self.kv_type in SCALED_KV
        self._kv_dtype = KV_DTYPES[self.kv_type]
        self._tensors = {need.name: _tensor(tensors, need.name) for need in program.weights}
        self._check_shapes()
        self._make_cache()
        self._kept = KeptTables()
        self._states = make_states(program, num_states)
        self._last_use = last_uses(program)
        self._alibi = {
            op.q_heads: torch.from_numpy(alibi_slopes(op.q_heads))
            for op in program.ops
            if isinstance(op, Attention) and op.alibi
        }

    def _make_cache(self) -> None:
        """Make rows for all blocks, and views of them for the layers.

        A block serves any group, so the layers of each group begin at the first column of its row.
        """
        ends = [0] * self._kv_groups, [0] * self._kv_groups
        spans: list[tuple[slice, slice]] = []
        for kv, group in zip(self.program.cache, self._group_of, strict=True):
            taken: list[slice] = []
            for end, width in zip(ends, (kv.key_width, 1), strict=True):
                start = end[group]
                end[group] += halves(kv) * BLOCK * kv.heads * width
                taken.append(slice(start, end[group]))
            spans.append((taken[0], taken[1]))
        self._rows = torch.zeros(self.num_blocks, max(ends[0]), dtype=self._kv_dtype)
        scaled = max(ends[1]) if self._kv_scaled else 0
        self._row_scales = torch.zeros(self.num_blocks, scaled)
        self._cache: list[Tensor] = []  # by layer: [block, keys or values, token, head, d]
        self._scales: list[Tensor | None] = []  # the same without d
        for kv, (values, scales) in zip(self.program.cache, spans, strict=True):
            shape = (self.num_blocks, halves(kv), BLOCK, kv.heads)
            self._cache.append(self._rows[:, values].view(*shape, kv.key_width))
            own = self._row_scales[:, scales].view(shape) if self._kv_scaled else None
            self._scales.append(own)

    # -- running -----------------------------------------------------------------------------

    def run(self, arrays: HasWords) -> Tensor:
        """Run a step; returns the logits [R, vocab] of its logit rows and updates the KV cache."""
        return self.logits(self.hidden(arrays))

    def hidden(self, arrays: HasWords) -> Tensor:
        """Run a step except its last op; returns the input of that op at the step's rows."""
        self.begin(arrays)
        values = self._run_to(len(self.program.ops) - 1)
        head = cast("Logits | Hidden", self.program.ops[-1])
        return values[head.x][self._row_token]

    def run_to(self, arrays: HasWords, index: int) -> list[Tensor]:
        """Run the ops before `index`; returns the inputs of op `index`, each [T, width]."""
        self.begin(arrays)
        values = self._run_to(index)
        return [values[v] for v in reads(self.program.ops[index])]

    def begin(self, arrays: HasWords) -> None:
        """Set the step for the following `run_op` calls; ValueError for an index out of range."""
        step = view(arrays, self._kept)
        check_step(
            step,
            vocab=self.program.vocab,
            num_blocks=self.num_blocks,
            block=BLOCK,
            groups=self._groups,
            num_states=self._num_states,
        )
        self._kept.keep(step)
        self._step: StepView = step
        self._slots = [
            torch.from_numpy(token_slots(step, BLOCK, group)).long()
            for group in range(self._kv_groups)
        ]
        self._positions = torch.from_numpy(step.positions).long()
        self._row_token = torch.from_numpy(step.row_token).long()

    def release(self, slot: int) -> None:
        """Forget the block tables of `slot`."""
        self._kept.release(slot)

    def run_op(self, index: int, inputs: Sequence[Tensor]) -> Tensor:
        """Run op `index` of the step set by `begin`; returns its output in fp32.

        The output is [T, width], or [R, vocab] for Logits; Hidden returns its input.
        inputs: the values that the op reads, in the order of dataflow.reads. RopeStoreKV returns
        the changed qkv and writes the KV cache.
        """
        op = self.program.ops[index]
        with torch.inference_mode():
            run = getattr(self, f"_{type(op).__name__.lower()}")
            return cast("Tensor", run(op, *(x.float() for x in inputs)))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, vocab] of rows [n, width] that `hidden` returned."""
        op = cast("Logits", self.program.ops[-1])
        with torch.inference_mode():
            return self._head(op, hidden)

    def kv_parts(self, block: int) -> list[Tensor]:
        """Views of the content of KV block `block`: keys and values, then their scales."""
        parts = self._rows[block], self._row_scales[block]
        return [part for part in parts if part.numel()]

    def closed_states(self, slot: int) -> list[Tensor]:
        """Views of the closed states of all recurrent layers in a slot."""
        return [part for states in self._states for part in states.closed(slot)]

    def _run_to(self, index: int) -> dict[ValueId, Tensor]:
        values: dict[ValueId, Tensor] = {}
        for i, op in enumerate(self.program.ops[:index]):
            if self.cancelled:
                msg = "another thread cancelled the step"
                raise RuntimeError(msg)
            out = self.run_op(i, [values[v] for v in reads(op)])
            target = cast("ValueId", written(op))
            values[target] = out
            for value in (*reads(op), target):
                if self._last_use[value] == i:
                    del values[value]
        return values

    # -- ops ---------------------------------------------------------------------------------

    def _embed(self, op: Embed) -> Tensor:
        ids = torch.from_numpy(self._step.token_ids).long()
        ids = torch.where(ids < op.vocab, ids, 0)
        weight = self._matrix(op.weight)
        rows = weight.rows(ids) if isinstance(weight, QuantMatrix) else weight[ids].float()
        return rows * op.scale

    def _positionembed(self, op: PositionEmbed, x: Tensor) -> Tensor:
        if op.weight is not None:
            x = x + self._vector(op.weight)[self._positions + op.offset]
        return x if op.types is None else x + self._vector(op.types)[0]

    def _rmsnorm(self, op: RmsNorm, x: Tensor) -> Tensor:
        weight = self._vector(op.weight)
        return rms_norm(x, (weight + 1 if op.plus_one else weight) * op.scale, op.eps)

    def _partnorm(self, op: PartNorm, x: Tensor) -> Tensor:
        at = slice(op.column, op.column + op.parts * op.width)
        parts = x[:, at].reshape(len(x), op.parts, op.width)
        out = x.clone()
        weight = torch.ones(op.width) if op.weight is None else self._vector(op.weight)
        out[:, at] = rms_norm(parts, weight, op.eps).reshape(len(x), -1)
        return out

    def _layernorm(self, op: LayerNorm, x: Tensor) -> Tensor:
        bias = None if op.bias is None else self._vector(op.bias)
        return F.layer_norm(x, (op.width,), self._vector(op.weight), bias, op.eps)

    def _linear(self, op: Linear, x: Tensor, out: Tensor | None = None) -> Tensor:
        parts = [self._multiply(x, w) for w in op.weights]
        biased = [
            y if b is None else y + self._vector(b) for y, b in zip(parts, op.biases, strict=True)
        ]
        y = activate(torch.cat(biased, dim=1), op.then)
        return y if out is None else out + y

    def _route(self, op: Route, x: Tensor) -> Tensor:
        scores = torch.sigmoid(x) if op.score == "sigmoid" else x
        wanted = scores if op.bias is None else scores + self._vector(op.bias)
        if op.groups is not None:
            wanted = keep_groups(wanted, op.groups)
        ids = torch.sort(wanted, dim=1, descending=True, stable=True).indices[:, : op.chosen]
        if op.score == "softmax":
            scores = torch.softmax(x, dim=1)
        weights = scores.gather(1, ids)
        if op.score == "chosen_softmax":
            weights = torch.softmax(weights, dim=1)
        if op.renormalize:
            weights = weights / weights.sum(dim=1, keepdim=True)
        weights = weights * op.scale
        if op.factors is not None:
            weights = weights * self._vector(op.factors)[ids]
        return torch.cat([ids.float(), weights], dim=1)

    def _routeadapters(self, op: RouteAdapters) -> Tensor:
        adapters = torch.from_numpy(self._step.token_adapters()).long()
        scales = self._vector(op.scales)[adapters.clamp(min=0)]
        return torch.stack([adapters.float(), scales], dim=1)

    def _spread(self, op: Spread, x: Tensor, routing: Tensor) -> Tensor:
        return x[routed_rows(routing, op.chosen) // op.chosen]

    def _expertlinear(self, op: ExpertLinear, x: Tensor, routing: Tensor) -> Tensor:
        experts = routing[:, : op.chosen].reshape(-1).long().sort().values
        experts = experts[experts >= 0]
        width = op.features[0] if op.then.endswith("_mul") else sum(op.features)
        out = torch.empty(len(x), width)
        for expert in sorted(set(experts.tolist())):
            rows = experts == expert
            y = torch.cat([self._multiply(x[rows], w) for w in op.weights[expert]], dim=1)
            if op.biases:
                y = y + torch.cat([self._vector(b) for b in op.biases[expert]])
            out[rows] = activate(y, op.then)
        return out

    def _combine(
        self, op: Combine, x: Tensor, routing: Tensor, out: Tensor | None = None
    ) -> Tensor:
        order = routed_rows(routing, op.chosen)
        place = torch.full((len(routing) * op.chosen,), -1)
        place[order] = torch.arange(len(order))
        out = torch.zeros(len(routing), op.width) if out is None else out.clone()
        for rank, rows in enumerate(place.reshape(-1, op.chosen).T):
            has = rows >= 0
            out[has] += routing[has, op.chosen + rank, None] * x[rows[has]]
        return out

    def _ropestorekv(self, op: RopeStoreKV, qkv: Tensor) -> Tensor:
        stored = 2 * op.kv_heads if op.stores else 0
        width = (op.q_heads + stored) * op.head_dim
        heads = qkv[:, :width].reshape(len(qkv), -1, op.head_dim)
        q, kv = heads[:, : op.q_heads], heads[:, op.q_heads :]
        k, v = kv.chunk(2, dim=1)
        more = 1 if op.plus_one else 0
        if op.q_norm is not None:
            q = rms_norm(q, self._vector(op.q_norm) + more, op.eps)
        if op.k_norm is not None:
            k = rms_norm(k, self._vector(op.k_norm) + more, op.eps)
        if op.rope is not None:
            cos, sin = self._turns(op.rope)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.kv_type in MIXED_KV:
            q = mix(q) / mix_width(op.head_dim)
            k = mix(k) if op.stores else k
        if op.stores:
            self._store(op.layer, k, v)
        changed = torch.cat([q, k, v], dim=1).reshape(len(qkv), -1)
        return torch.cat([changed, qkv[:, width:]], dim=1)

    def _store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write k and v [T, heads, d] of the step's tokens to the cache of a layer."""
        scales, slots = self._scales[layer], self._slots[self._group_of[layer]]
        at = slots // BLOCK, slots % BLOCK
        for half, x in enumerate((k, v)[: self._cache[layer].shape[1]]):
            if scales is None:
                self._cache[layer][:, half][at] = x.to(self._kv_dtype)
            else:
                codes, scale = encode_kv(x, self.kv_type)
                self._cache[layer][:, half][at] = codes.view(self._kv_dtype)
                scales[:, half][at] = scale

    def _headlinear(self, op: HeadLinear, x: Tensor) -> Tensor:
        weight = self._matrix(op.weight)
        if self.mode == "emulated" and self.kinds.get(op.weight, "dense_f32") not in FLOAT_ROWS:
            x = x.bfloat16().float()
        out = []
        for h in range(op.heads):
            begin, rows = h * op.rows + op.first, op.in_features if op.transposed else op.features
            at = slice(begin, begin + rows)
            w = weight.rows(at) if isinstance(weight, QuantMatrix) else weight[at].float()
            if isinstance(weight, QuantMatrix) and self.mode == "emulated":
                w = w.bfloat16().float()
            part = x[:, h * op.step :][:, : op.in_features]
            out.append(part @ (w if op.transposed else w.T))
        return torch.cat(out, dim=1)

    def _turns(self, rope: Rope) -> tuple[Tensor, Tensor]:
        """(cos, sin) of the step's positions, each [T, 1, rotary / 2]."""
        cos, sin = rope_tables(rope, self._step.positions, long=self._long_rope)
        return torch.from_numpy(cos)[:, None], torch.from_numpy(sin)[:, None]

    def _latentstorekv(self, op: LatentStoreKV, q: Tensor, latent: Tensor, kv: Tensor) -> Tensor:
        row = rms_norm(kv[:, : op.rank], self._vector(op.norm), op.eps)
        cos, sin = self._turns(op.rope)
        turned = []
        for x in (q.reshape(len(q), op.q_heads, -1)[:, :, op.nope :], kv[:, None, op.rank :]):
            pairs = torch.cat([x[..., ::2], x[..., 1::2]], dim=-1) if op.interleaved else x
            turned.append(rotate(pairs, cos, sin))
        k = torch.cat([row[:, None], turned[1]], dim=2)
        self._store(op.layer, k, k)
        absorbed = latent.reshape(len(q), op.q_heads, op.rank)
        return torch.cat([absorbed, turned[0]], dim=2).reshape(len(q), -1)

    def _splitgates(self, op: SplitGates, x: Tensor) -> Tensor:
        width = 2 * op.heads * op.head_dim
        queries, gates = x[:, :width].reshape(len(x), op.heads, 2, op.head_dim).unbind(2)
        parts = queries.reshape(len(x), -1), x[:, width:], gates.reshape(len(x), -1)
        return torch.cat(parts, dim=1)

    def _gate(self, op: Gate, x: Tensor, out: Tensor) -> Tensor:
        gates = x[:, op.column : op.column + (1 if op.single else op.width)]
        return out * (gates if op.plain else torch.sigmoid(gates))

    def _gateddelta(self, op: GatedDelta, x: Tensor, gates: Tensor) -> Tensor:
        weights = DeltaWeights(*map(self._vector, (op.conv, op.a_log, op.dt_bias, op.norm)))
        step, states = self._step, cast("DeltaStates", self._states[op.state])
        out = torch.empty(len(x), op.value_heads * op.value_width)
        for seq in range(step.num_seqs):
            at, table = step.queries(seq), step.table(seq, self._kv_groups)
            start, gone = int(step.positions[at.start]), self.num_blocks - 1
            out[at] = states.run(x[at], gates[at], start, table, gone, weights)
        return out

    def _shortconv(self, op: ShortConv, x: Tensor) -> Tensor:
        inputs, weight = x[:, op.column : op.column + op.channels], self._vector(op.weight)
        states = cast("ConvInputs", self._states[op.state])
        out = torch.empty(len(x), op.channels)
        for at, part in self._state_parts():
            out[at] = states.run(inputs[at], part, weight)
        if op.bias is not None:
            out = out + self._vector(op.bias)
        return F.silu(out) if op.silu else out

    def _mamba2(self, op: Mamba2, x: Tensor, steps: Tensor) -> Tensor:
        weights = Mamba2Weights(*map(self._vector, (op.a_log, op.dt_bias, op.d)))
        steps = steps[:, op.column : op.column + op.heads]
        states = cast("Mamba2States", self._states[op.state])
        out = torch.empty(len(x), op.heads * op.value_width)
        for at, part in self._state_parts():
            out[at] = states.run(x[at], steps[at], part, weights)
        return out

    def _state_parts(self) -> Iterator[tuple[slice, Part]]:
        """The rows of all sequences of the step, in parts of one chunk each."""
        step, gone = self._step, self.num_blocks - 1
        for seq in range(step.num_seqs):
            rows, table = step.queries(seq), step.table(seq, self._kv_groups)
            start = int(step.positions[rows.start])
            for part in parts_of(rows.stop - rows.start, start, table, gone, BLOCK):
                yield slice(rows.start + part.first, rows.start + part.end), part

    def _gatednorm(self, op: GatedNorm, x: Tensor, z: Tensor) -> Tensor:
        gated = x * F.silu(z[:, op.column : op.column + op.width])
        normed = rms_norm(gated.reshape(len(x), op.groups, -1), torch.ones(()), op.eps)
        return normed.reshape(x.shape) * self._vector(op.weight)

    def _attention(self, op: Attention, qkv: Tensor) -> Tensor:
        q = qkv[:, : op.q_heads * op.head_dim].reshape(len(qkv), op.q_heads, op.head_dim)
        out = torch.empty_like(q)
        for seq in range(self._step.num_seqs):
            at = self._step.queries(seq)
            group = self._group_of[op.layer]
            slots = torch.from_numpy(key_slots(self._step, seq, BLOCK, group)).long()
            blocks, tokens = slots // BLOCK, slots % BLOCK
            stored = self._cache[op.layer][blocks, :, tokens]
            stored = stored.view(FP8.get(self.kv_type, self._kv_dtype)).float()
            k, v = stored[:, 0], stored[:, -1]  # one and the same of a latent layer
            scales, v_scale = self._scales[op.layer], None
            if scales is not None:
                k = k * scales[blocks, 0, tokens][..., None]
                v_scale = scales[blocks, -1, tokens]
            if v_scale is not None and self.mode == "reference":
                v, v_scale = v * v_scale[..., None], None
            if op.window:
                # Blocks left of the window may have been freed: 0 times their content may be NaN.
                first = max(0, len(slots) - (at.stop - at.start) - op.window + 1)
                for read in (k, v) if v_scale is None else (k, v, v_scale):
                    read[:first] = 0.0
            for start in range(at.start, at.stop, QUERIES_AT_ONCE):
                some = slice(start, min(start + QUERIES_AT_ONCE, at.stop))
                out[some] = self._attend(op, q[some], k, v, self._positions[some], v_scale)
        return out.reshape(len(qkv), -1)

    def _add(self, op: Add, x: Tensor, out: Tensor) -> Tensor:
        out = out.clone()
        out[:, op.column : op.column + op.width] += x
        return out

    def _columns(self, op: Columns, x: Tensor, more: Tensor | None = None) -> Tensor:
        own = x[:, op.column : op.column + op.width]
        return own.clone() if more is None else torch.cat([own, more], dim=1)

    def _mixparts(
        self, op: MixParts, gates: Tensor, target_or_x: Tensor, x: Tensor | None = None
    ) -> Tensor:
        coefficients = torch.tanh(gates) @ self._vector(op.weight).T
        parts = (target_or_x if x is None else x).reshape(len(gates), op.parts, op.width)
        if x is None:
            by = coefficients.reshape(len(gates), op.parts, op.parts)
            return (parts + by @ parts).reshape(len(gates), -1)
        change = op.scale * target_or_x - parts[:, op.active]
        return (parts + (1 + coefficients)[..., None] * change[:, None]).reshape(len(gates), -1)

    def _matchrms(self, op: MatchRms, like: Tensor, x: Tensor) -> Tensor:
        wanted = like.square().mean(dim=1).sqrt()[:, None, None]
        parts = x.reshape(len(x), op.parts, op.width)
        own = parts.square().mean(dim=2, keepdim=True).clamp(min=op.floor).sqrt()
        return (parts * wanted / own).reshape(x.shape)

    def _keeptop(self, op: KeepTop, x: Tensor) -> Tensor:
        own, rest = x[:, : op.width], x[:, op.width :]
        deviation, mean = torch.std_mean(own, dim=1, correction=0, keepdim=True)
        return torch.cat([F.relu(own - mean - op.deviations * deviation), rest], dim=1)

    def _scale(self, op: Scale, x: Tensor) -> Tensor:
        return x * self._vector(op.weight)

    def _activationop(self, op: ActivationOp, x: Tensor) -> Tensor:
        return activate(x, op.then)

    def _hidden(self, _op: Hidden, x: Tensor) -> Tensor:
        return x

    def _logits(self, op: Logits, x: Tensor) -> Tensor:
        return self._head(op, x[self._row_token])

    def _head(self, op: Logits, x: Tensor) -> Tensor:
        y = self._multiply(x, op.weight)
        if op.bias is not None:
            y = y + self._vector(op.bias)
        return soften(y * op.scale, op.softcap)

    # -- attention ---------------------------------------------------------------------------

    def _attend(
        self,
        op: Attention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        v_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of one sequence: q [n, Hq, d] at `positions`, k and v [keys, Hk, d] from 0 on.

        v_scale [keys, Hk]: scales of v that are not applied yet (emulated mode).
        """
        group = op.q_heads // op.kv_heads
        rounded = self.mode == "emulated" and self.kv_type not in ("f16", "f32")
        if rounded:
            q = q.bfloat16().float()
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        s = soften(torch.einsum("nhd,khd->nhk", q, k) * op.scale, op.softcap)
        distance = positions[:, None] - torch.arange(len(k))  # [n, keys], >= 0 is visible
        if op.alibi:
            s = s - self._alibi[op.q_heads][:, None] * distance[:, None]
        s = s.masked_fill(~visible(distance, op.window, causal=op.causal)[:, None], -torch.inf)
        sink = None if op.sinks is None else self._vector(op.sinks)[:, None].expand(len(q), -1, 1)
        if self.mode == "emulated":
            if v_scale is not None:
                v_scale = v_scale.repeat_interleave(group, dim=1)
            return chunked_softmax(s, v, sink, round_p=rounded, v_scale=v_scale)
        every = s if sink is None else torch.cat([s, sink], dim=2)
        p = torch.softmax(every, dim=2)[:, :, : s.shape[2]]
        return torch.einsum("nhk,khd->nhd", p, v)

    # -- weights -----------------------------------------------------------------------------

    def _multiply(self, x: Tensor, name: str) -> Tensor:
        """x W^T in fp32; in the emulated mode, x is rounded as for the kind of the weight."""
        weight = self._matrix(name)
        kind = self.kinds.get(name, "")
        if ACT_FORMAT.get(kind) == "bf16":
            x = x.bfloat16().float()
        if isinstance(weight, QuantMatrix):
            if self.mode == "emulated" and ACT_FORMAT.get(kind) != "bf16":
                return self._multiply_int8(x, weight, kind)
            return torch.cat([x @ weight.rows(at).T for at in row_blocks(weight)], dim=1)
        if weight.dtype == torch.float32:
            return x @ weight.T
        return torch.cat([x @ weight[at].float().T for at in row_blocks(weight)], dim=1)

    def _multiply_int8(self, x: Tensor, weight: QuantMatrix, kind: str) -> Tensor:
        if weight.order is not None:
            x = x[:, weight.order]
        if kind.startswith("w8_channel"):
            return multiply_channel(x, weight, GROUP128 if kind.endswith("g128") else 0)
        group = GROUP256 if ACT_FORMAT[kind] == "q8g256" else weight.group
        if self.activation_bits == 16 and group != GROUP128:
            return multiply_two_terms(x, weight, group)
        return multiply_grouped(x, weight, group)

    def _matrix(self, name: str) -> Matrix:
        weight = self._tensors[name]
        if isinstance(weight, QuantMatrix) or self.mode == "reference":
            return weight
        return weight.to(DENSE_DTYPES[self.kinds.get(name, "dense_f32")])

    def _vector(self, name: str) -> Tensor:
        return cast("Tensor", self._tensors[name]).float()

    def set_weight(self, name: str, tensor: Matrix) -> None:
        """Replace a weight of the program by one of the same shape, between runs."""
        assert tensor.shape == self._tensors[name].shape
        self._tensors[name] = tensor

    def _check_shapes(self) -> None:
        for need in self.program.weights:
            shape = tuple(self._tensors[need.name].shape)
            if shape != need.shape:
                msg = f"{need.name} has shape {shape}, but the program needs {need.shape}"
                raise ValueError(msg)


def make_states(program: Program, slots: int) -> list[DeltaStates | ConvInputs | Mamba2States]:
    """The contents of the `slots` state slots of each recurrent layer."""
    made: list[DeltaStates | ConvInputs | Mamba2States] = []
    for op in program.ops:
        if isinstance(op, GatedDelta):
            heads = (op.key_heads, op.value_heads, op.key_width, op.value_width)
            made.append(DeltaStates(DeltaSizes(*heads, op.taps, op.eps, op.tiled), slots, BLOCK))
        elif isinstance(op, ShortConv):
            made.append(ConvInputs(op.channels, op.taps, slots))
        elif isinstance(op, Mamba2):
            sizes = (op.heads, op.groups, op.key_width, op.value_width, op.low, op.high)
            made.append(Mamba2States(Mamba2Sizes(*sizes), slots))
    return made


def keep_groups(scores: Tensor, groups: Groups) -> Tensor:
    """Scores [T, experts], -inf outside each token's best groups."""
    by_group = scores.reshape(len(scores), groups.count, -1)
    totals = by_group.topk(groups.best, dim=2).values.sum(dim=2)
    best = torch.sort(totals, dim=1, descending=True, stable=True).indices[:, : groups.kept]
    kept = torch.zeros_like(totals, dtype=torch.bool).scatter_(1, best, True)
    return by_group.masked_fill(~kept[..., None], -torch.inf).reshape(scores.shape)


def halves(layer: CacheLayer) -> int:
    """2 for keys and values, 1 if they are the same."""
    return 1 if layer.latent else 2


def routed_rows(routing: Tensor, chosen: int) -> Tensor:
    """token * chosen + rank of each routed row: by expert, then token; -1 adds no row."""
    sorted_ids = routing[:, :chosen].reshape(-1).sort(stable=True)
    return sorted_ids.indices[sorted_ids.values >= 0]
