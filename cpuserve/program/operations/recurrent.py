"""Recurrent layers: gated delta nets, short convolutions and Mamba2."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict, cast

from cpuserve.base.errors import ModelError
from cpuserve.config.cache_groups import STATE_CHUNK
from cpuserve.program.base_builder import BaseBuilder
from cpuserve.program.elementary import exponential
from cpuserve.program.ops import Op, ValueId
from cpuserve.program.program import StateLayer, whole_lines

if TYPE_CHECKING:
    from torch import Tensor

    from cpuserve.program.interpret import Interpreter
    from cpuserve.program.loads import Float32, ReadFn
    from cpuserve.program.lower import Lowering
    from cpuserve.program.reference.recurrent import (
        ConvInputs,
        DeltaStates,
        Mamba2States,
        ScanStates,
    )

# Threads claim the work of a recurrent layer in units: a unit is some channels or heads of one
# sequence.
# Units are so small that every thread gets some, and so large that claims take little time.
CONV_CHANNELS = 256  # the most channels in a unit of a short convolution
STATE_HEADS = 8  # the most heads in a unit of Mamba2: its kernel reads 8 states together


class DeltaSizes(TypedDict):
    """The sizes of a gated delta net: heads, columns of a head, and tokens of its convolution."""

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    taps: int


class GatedDelta(Op, frozen=True):
    """A gated delta net: short convolution, gated delta rule, and gated norm of each head.

    x: the queries of all key heads, then the keys of all key heads (`key_width` columns each),
      then the values of all value heads, then their output gates z (`value_width` columns each).
    gates: b of all value heads, then a, [T, 2 * value_heads].
    out: [T, value_heads * value_width].
    tiled: value head i belongs to key head i % key_heads, otherwise to key head
      i // (value_heads / key_heads).

    Queries, keys and values pass through a causal convolution over `taps` tokens, then SiLU.
    Its weight `conv` is [channels, 1, taps]; channels are all queries, all keys, all values.
    Queries and keys are then divided by their length, and queries by sqrt(key_width).
    With beta = sigmoid(b) and decay = exp(-exp(a_log) softplus(a + dt_bias)),
    each value head has a state S [key_width, value_width]:

        S_t = decay S_(t-1) + k (x) u,  u = beta (v - decay S_(t-1)^T k),  o = S_t^T q

    and out = RmsNorm(o) norm silu(z). The state of a sequence is in state layer `state`.
    Source: Yang et al. 2024 (Gated Delta Networks).

    conv: the weight of the convolution, or three weights: for queries, keys and values.
    beta: a factor of sigmoid(b).
    by_row: each row of a state has a decay of its own.
      `gates` then has b of all heads, and after them a of all rows of all states.
    sigmoid: the gate of the norm is sigmoid(z) instead of silu(z).
    bound: if not 0, decay = exp(bound sigmoid(exp(a_log) (a + dt_bias))).

    Source of these parameters: transformers, the modules of the families that have them.
    """

    reads_of = ("x", "gates")
    claimed = True

    x: ValueId
    gates: ValueId
    out: ValueId
    state: int
    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    taps: int
    conv: tuple[str, ...]
    a_log: str
    dt_bias: str
    norm: str
    eps: float
    tiled: bool = False
    beta: float = 1.0
    by_row: bool = False
    sigmoid: bool = False
    bound: float = 0.0

    def lower(self, to: Lowering) -> None:
        import numpy as np

        heads, width = self.key_heads, self.key_width
        values = self.value_heads * self.value_width
        channels = 2 * heads * width + values

        def conv(read: ReadFn) -> Float32:
            """Return the weight [channels, 1, taps] as [key heads, taps, channels of a head]."""
            weight = np.concatenate([read(name).reshape(-1, self.taps) for name in self.conv])
            q, k, v = np.split(weight, [heads * width, 2 * heads * width])
            if self.tiled:
                v = v.reshape(-1, heads, self.value_width, self.taps).swapaxes(0, 1)
            parts = [p.reshape(heads, -1, self.taps) for p in (q, k, v)]
            return np.concatenate(parts, axis=1).transpose(0, 2, 1)

        to.add(
            self,
            conv=to.vector(("conv", self.conv), channels * self.taps, conv),
            rates=to.vector(
                ("rates", self.a_log),
                self.value_heads,
                lambda read: -exponential(read(self.a_log).reshape(-1)),
            ),
            dt_bias=to.plain(self.dt_bias, self.value_heads * (width if self.by_row else 1)),
            norm=to.plain(self.norm, self.value_width),
        )

    def reference(self, at: Interpreter, x: Tensor, gates: Tensor) -> Tensor:
        import torch

        from cpuserve.program.reference.recurrent import DeltaWeights

        conv = torch.cat([at.vector(name) for name in self.conv])
        weights = DeltaWeights(conv, *map(at.vector, (self.a_log, self.dt_bias, self.norm)))
        step, states = at.step, cast("DeltaStates", at.states[self.state])
        out = torch.empty(len(x), self.value_heads * self.value_width)
        for seq in range(step.num_seqs):
            where, table = step.queries(seq), step.table(seq, at.kv_groups)
            start, gone = int(step.positions[where.start]), at.num_blocks - 1
            out[where] = states.run(x[where], gates[where], start, table, gone, weights)
        return out

    def make_states(self, slots: int) -> DeltaStates:
        """Return empty states and open rows of the layer."""
        from cpuserve.program.reference.attention import BLOCK
        from cpuserve.program.reference.recurrent import DeltaShape, DeltaStates

        heads = (self.key_heads, self.value_heads, self.key_width, self.value_width)
        kinds = (self.beta, self.by_row, self.sigmoid, self.bound)
        shape = DeltaShape(*heads, self.taps, self.eps, self.tiled, *kinds)
        return DeltaStates(shape, slots, BLOCK)


class ShortConv(Op, frozen=True):
    """A causal convolution of each channel over the last `taps` tokens, then SiLU if `silu`.

    out[t, c] = bias[c] + sum over j of weight[c, 0, j] x[t - (taps - 1 - j) dilation, column + c],
    where inputs before the sequence are 0. weight [channels, 1, taps], bias [channels] or None.
    State layer `state` keeps the last inputs of a sequence, in `units` equal parts of the channels.

    fixed: the factors of all channels, one for each tap; there is then no weight.
    """

    claimed = True

    x: ValueId
    out: ValueId
    state: int
    channels: int
    taps: int
    weight: str
    bias: str | None
    column: int
    units: int
    silu: bool
    dilation: int = 1
    fixed: tuple[float, ...] = ()

    def lower(self, to: Lowering) -> None:
        key = ("conv", self.weight or (self.fixed, self.channels))
        weight = to.vector(key, self.channels * self.taps, self._by_tap)
        to.add(self, weight=weight, bias=to.plain(self.bias, self.channels))

    def _by_tap(self, read: ReadFn) -> Float32:
        """Return the factors [taps, channels]."""
        import numpy as np

        if self.fixed:
            return np.repeat(np.array(self.fixed, np.float32), self.channels)
        return read(self.weight).reshape(self.channels, self.taps).T

    def reference(self, at: Interpreter, x: Tensor) -> Tensor:
        import torch
        from torch.nn import functional as F

        inputs = x[:, self.column : self.column + self.channels]
        if self.fixed:
            weight = torch.tensor(self.fixed).expand(self.channels, 1, -1)
        else:
            weight = at.vector(self.weight)
        states = cast("ConvInputs", at.states[self.state])
        out = torch.empty(len(x), self.channels)
        for where, part in at.state_parts():
            out[where] = states.run(inputs[where], part, weight)
        if self.bias is not None:
            out = out + at.vector(self.bias)
        return F.silu(out) if self.silu else out

    def make_states(self, slots: int) -> ConvInputs:
        """Return `slots` empty state slots for the last inputs, which the next tokens need."""
        from cpuserve.program.reference.recurrent import ConvInputs

        return ConvInputs(self.channels, self.taps, slots, self.dilation)


class Mamba2(Op, frozen=True):
    """The state space model of Mamba2 over x, the output of a short convolution.

    x: the values of all heads, then B of all groups, then C of all groups,
      [T, heads * value_width + 2 * groups * key_width].
    out: [T, heads * value_width].

    The heads of a group share its B and C. With dt = softplus(steps[column + head] + dt_bias),
    clamped to [low, high], each head has a state S [key_width, value_width]:

        S_t = exp(-exp(a_log) dt) S_(t-1) + B (x) (dt x),  out = S_t^T C + d x

    The state of a sequence is in state layer `state`, in units of `together` heads of a group.
    Source: transformers modeling_granitemoehybrid; Dao and Gu 2024 (Transformers are SSMs).

    slopes: speeds of decay; the state of a head then decays by exp(-slope) at each token, steps
      are 1, and there is no d (lightning attention, transformers modeling_minimax).
    """

    claimed = True

    x: ValueId
    steps: ValueId | None
    out: ValueId
    state: int
    heads: int
    groups: int
    key_width: int
    value_width: int
    together: int
    column: int
    a_log: str | None
    dt_bias: str | None
    d: str | None
    low: float
    high: float
    slopes: tuple[float, ...] = ()

    def reads(self) -> tuple[ValueId, ...]:
        """The values, keys and queries, and the steps if there are any."""
        return (self.x,) if self.steps is None else (self.x, self.steps)

    def lower(self, to: Lowering) -> None:
        names = (self.dt_bias, self.d)
        dt_bias, d = (to.plain(name, self.heads) for name in names)
        rates = to.vector(("rates", self.a_log or self.slopes), self.heads, self._rates)
        to.add(self, rates=rates, dt_bias=dt_bias, d=d)

    def _rates(self, read: ReadFn) -> Float32:
        """Return the logarithm of the decay of each head during a step of 1."""
        import numpy as np

        if self.a_log is None:
            return -np.array(self.slopes, np.float32)
        return -exponential(read(self.a_log))

    def reference(self, at: Interpreter, x: Tensor, steps: Tensor | None = None) -> Tensor:
        import torch
        from torch.nn import functional as F

        from cpuserve.program.reference.recurrent import Mamba2Weights

        # Not _rates: the reference is independent of it, and may compute in fp64.
        rates = -(torch.tensor(self.slopes) if self.a_log is None else at.vector(self.a_log).exp())
        dt, d = torch.ones(len(x), self.heads), torch.zeros(self.heads)
        if steps is not None and self.dt_bias is not None and self.d is not None:
            raw = steps[:, self.column : self.column + self.heads] + at.vector(self.dt_bias)
            dt, d = F.softplus(raw).clamp(self.low, self.high), at.vector(self.d)
        weights = Mamba2Weights(rates, d)
        states = cast("Mamba2States", at.states[self.state])
        out = torch.empty(len(x), self.heads * self.value_width)
        for where, part in at.state_parts():
            out[where] = states.run(x[where], dt[where], part, weights)
        return out

    def make_states(self, slots: int) -> Mamba2States:
        """Return empty states and open rows of the layer."""
        from cpuserve.program.reference.recurrent import Mamba2Shape, Mamba2States

        widths = (self.key_width, self.value_width)
        return Mamba2States(Mamba2Shape(self.heads, self.groups, *widths), slots)


class SelectiveScan(Op, frozen=True):
    """The selective scan of Mamba 1 over x, the output of a short convolution [T, channels].

    steps: [T, channels]. b, c: [T, width]. gates: the gates z are its columns from `column` on.
    out: [T, channels].

    With dt = softplus(steps), each channel i has a state S of `width` numbers n:

        S_t[n] = exp(-exp(a_log[i, n]) dt[i]) S_(t-1)[n] + b[n] dt[i] x[i]
        out[i] = (sum over n of c[n] S_t[n] + d[i] x[i]) silu(z[i])

    The state of a sequence is in state layer `state`, in `units` equal parts of the channels.
    Source: transformers modeling_mamba; Gu and Dao 2023 (Mamba).
    """

    reads_of = ("x", "steps", "b", "c", "gates")
    claimed = True

    x: ValueId
    steps: ValueId
    b: ValueId
    c: ValueId
    gates: ValueId
    out: ValueId
    state: int
    channels: int
    width: int
    units: int
    column: int
    a_log: str
    d: str

    def lower(self, to: Lowering) -> None:
        to.add(
            self,
            rates=to.vector(
                ("rates", self.a_log),
                self.channels * self.width,
                lambda read: -exponential(read(self.a_log).reshape(self.channels, self.width).T),
            ),
            d=to.plain(self.d, self.channels),
        )

    def reference(
        self, at: Interpreter, x: Tensor, steps: Tensor, b: Tensor, c: Tensor, gates: Tensor
    ) -> Tensor:
        import torch
        from torch.nn import functional as F

        rates = -torch.exp(at.vector(self.a_log))
        states, dt = cast("ScanStates", at.states[self.state]), F.softplus(steps)
        out = torch.empty_like(x)
        for where, part in at.state_parts():
            out[where] = states.run(
                dt[where], dt[where] * x[where], b[where], c[where], part, rates
            )
        z = gates[:, self.column : self.column + self.channels]
        return (out + at.vector(self.d) * x) * F.silu(z)

    def make_states(self, slots: int) -> ScanStates:
        """Return empty states and open rows of the layer."""
        from cpuserve.program.reference.recurrent import ScanStates

        return ScanStates(self.channels, self.width, slots)


def _delta_state(op: GatedDelta, channels: int) -> StateLayer:
    """Return the sizes of the state of a gated delta net; a key head has `channels` channels.

    A unit of the state is a key head. It keeps the states of its value heads and the last inputs
    of its channels. For every open token (a token after the closed state) it also keeps the key,
    u and decay of each value head (or of each row of its state), and the inputs of the channels.
    """
    each = op.value_heads // op.key_heads
    closed = each * op.key_width * op.value_width + (op.taps - 1) * channels
    row = whole_lines(op.key_width) + each * whole_lines(op.value_width) + channels
    row += whole_lines(op.key_width) if op.by_row else each
    return StateLayer(op.key_heads, closed, STATE_CHUNK * row)


class RecurrentBuilder(BaseBuilder):
    """Appends recurrent layers."""

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
        split_conv: bool = False,
        norm: str = "norm",
        beta: float = 1.0,
        by_row: bool = False,
        sigmoid: bool = False,
        bound: float = 0.0,
        rates: tuple[int, ...] = (),
    ) -> ValueId:
        """Return the output of a gated delta net over x: [T, value_heads * value_width].

        The weights of layer `name` are conv1d.weight, A_log, dt_bias and norm.weight.
        See `GatedDelta` for the columns of x and gates, and for the other parameters.

        split_conv: there are weights q_conv1d, k_conv1d and v_conv1d instead of conv1d.
        norm: the name of the norm's module in the layer.
        rates: the shape of A_log, if it is not [value_heads].
        """
        if value_heads % key_heads or (by_row and value_heads != key_heads):
            msg = f"{name}: {value_heads} value heads cannot share {key_heads} key heads evenly"
            raise ModelError(msg)
        each = value_heads // key_heads
        channels = 2 * key_width + each * value_width
        wide = key_heads * (channels + each * value_width)
        self._check_width(f"{name}: x", x, wide)
        decays = value_heads * (key_width if by_row else 1)
        self._check_width(f"{name}: gates", gates, value_heads + decays)
        keys, values = key_heads * key_width, value_heads * value_width
        out = self._value(name, values)
        convs = {"q_conv1d": keys, "k_conv1d": keys, "v_conv1d": values}
        if not split_conv:
            convs = {"conv1d": 2 * keys + values}
        weights = (
            self._conv_weights(name, convs, taps),
            self._need(f"{name}.A_log", rates or (value_heads,), "vector"),
            self._need(f"{name}.dt_bias", (decays,), "vector"),
            self._need(f"{name}.{norm}.weight", (value_width,), "vector"),
        )
        sizes = (key_heads, value_heads, key_width, value_width, taps)
        op = GatedDelta(
            *(x, gates, out, len(self._states), *sizes, *weights, self._eps(eps), tiled, beta),
            by_row=by_row,
            sigmoid=sigmoid,
            bound=bound,
        )
        self._ops.append(op)
        self._states.append(_delta_state(op, channels))
        return out

    def _conv_weights(self, name: str, convs: Mapping[str, int], taps: int) -> tuple[str, ...]:
        """Declare the weights of convolutions {name: channels}.

        Return the weights with their full paths.
        """
        return tuple(
            self._need(f"{name}.{conv}.weight", (channels, 1, taps), "table")
            for conv, channels in convs.items()
        )

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
        dilation: int = 1,
    ) -> ValueId:
        """Return a causal convolution of columns of x over `taps` tokens: [T, channels].

        channels: the number of columns, from `column` on; by default all columns from there.
        dilation: the number of tokens from one tap to the next.
          The first tap may be at most STATE_CHUNK tokens back.
        """
        if (taps - 1) * dilation > STATE_CHUNK:
            msg = f"{name}: {taps} taps with dilation {dilation} are more than {STATE_CHUNK} back"
            raise ModelError(msg)
        channels = self._width(x) - column if channels is None else channels
        self._check_columns(f"{name}: x", x, column, channels)
        weight = self._need(f"{name}.weight", (channels, 1, taps), "table")
        shift = self._need(f"{name}.bias", (channels,), "vector") if bias else None
        out = self._value(name, channels)
        state, units = len(self._states), channels // largest_part(channels, CONV_CHANNELS)
        self._ops.append(
            ShortConv(x, out, state, channels, taps, weight, shift, column, units, silu, dilation)
        )
        # A unit of the state keeps the inputs of its channels for the last tokens before the chunk
        # of STATE_CHUNK tokens, and for the tokens of the chunk so far (open tokens).
        each = channels // units
        self._states.append(StateLayer(units, (taps - 1) * dilation * each, STATE_CHUNK * each))
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
        """Return the output of the state space model of Mamba2 over x: [T, heads * value_width].

        The weights of layer `name` are A_log, dt_bias and D. See `Mamba2` for the columns of x.

        steps: a value with the step size of each head, in the columns from `column` on.
        limits: the smallest and the largest step size.
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
        self._add_states(heads, each, key_width, value_width)
        return out

    def decayed_sums(
        self, x: ValueId, name: str, *, width: int, slopes: Sequence[float]
    ) -> ValueId:
        """Return queries times decayed sums of keys (x) values: [T, heads * width].

        x: the values of all heads, then their keys, then their queries, `width` columns each.
        slopes: one number for each head; its sums decay by exp(-slope) at each token (`Mamba2`).
        """
        heads = len(slopes)
        self._check_width(f"{name}: x", x, 3 * heads * width)
        out, sizes = self._value(name, heads * width), (heads, heads, width, width, 1, 0)
        fixed = (None, None, None, 0.0, math.inf, tuple(slopes))
        self._ops.append(Mamba2(x, None, out, len(self._states), *sizes, *fixed))
        self._add_states(heads, 1, width, width)
        return out

    def _add_states(self, heads: int, each: int, key_width: int, value_width: int) -> None:
        """Add the states of `heads` heads, in units of `each` heads."""
        # A unit of the state keeps the states of some heads of a group. For every open token
        # (a token after the closed state) it also keeps B, and u and decay of each head.
        row = whole_lines(key_width) + each * (whole_lines(value_width) + 1)
        closed = each * key_width * value_width
        self._states.append(StateLayer(heads // each, closed, STATE_CHUNK * row))

    def selective_scan(
        self,
        x: ValueId,
        steps: ValueId,
        b: ValueId,
        c: ValueId,
        gates: ValueId,
        name: str,
        *,
        column: int = 0,
    ) -> ValueId:
        """Return the output of the selective scan of Mamba 1 over x: [T, channels].

        The weights of layer `name` are A_log and D. See `SelectiveScan` for the values.

        column: the first column of z in `gates`.
        """
        channels, width = self._width(x), self._width(b)
        self._check_width(f"{name}: steps", steps, channels)
        self._check_width(f"{name}: c", c, width)
        self._check_columns(f"{name}: gates", gates, column, channels)
        a_log = self._need(f"{name}.A_log", (channels, width), "table")
        d = self._need(f"{name}.D", (channels,), "vector")
        out, state = self._value(name, channels), len(self._states)
        each = largest_part(channels, CONV_CHANNELS)
        sizes = (state, channels, width, channels // each, column)
        self._ops.append(SelectiveScan(x, steps, b, c, gates, out, *sizes, a_log, d))
        # A unit of the state keeps the states of its channels. For every open token (a token after
        # the closed state) it also keeps b, and dt and dt x of each channel.
        row = 2 * each + whole_lines(width)
        self._states.append(StateLayer(channels // each, width * each, STATE_CHUNK * row))
        return out


def largest_part(count: int, most: int) -> int:
    """Return the largest divisor of `count` that is at most `most`."""
    return next(part for part in range(min(count, most), 0, -1) if count % part == 0)
