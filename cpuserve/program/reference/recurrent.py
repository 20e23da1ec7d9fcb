"""The reference of recurrent layers, in torch: closed states and open tokens (DeltaStates)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from cpuserve.config.cache_groups import STATE_CHUNK
from cpuserve.program.view import Int32, state_slot

LENGTH_EPS = 1e-6  # added to the squared length of a query or key


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """Rows [first, end) of a sequence in a step, which are all in one chunk of STATE_CHUNK tokens.

    State slot `slot` already has the first `num_open` rows of the chunk.

    closed: the state slot with the state before the chunk, or -1 at the beginning of a sequence.
    """

    first: int
    end: int
    num_open: int
    slot: int
    closed: int

    @property
    def closes(self) -> bool:
        """Return whether the chunk is full after these rows."""
        return self.num_open + self.end - self.first == STATE_CHUNK


def parts_of(n: int, start: int, table: Int32, gone: int, block: int) -> Iterator[ChunkRows]:
    """Yield the n rows of tokens `start`, `start` + 1 and so on of a sequence, chunk by chunk.

    table: the state slot of each block of `block` tokens; `gone` for a block without a slot.
    """
    done = 0
    while done < n:
        at = start + done
        base = at // STATE_CHUNK * STATE_CHUNK
        end = min(n, done + base + STATE_CHUNK - at)
        slot = state_slot(table, at // block, gone)
        closed = state_slot(table, (base - 1) // block, gone) if base else -1
        yield ChunkRows(done, end, at - base, slot, closed)
        done = end


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """The weights of a GatedDelta layer in fp32, with the names of the fields of the op."""

    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """The sizes of a GatedDelta layer, with the names of the fields of the op."""

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    taps: int
    eps: float
    tiled: bool
    beta: float
    by_row: bool
    sigmoid: bool
    bound: float


class DeltaStates:
    """The states of one GatedDelta layer in each state slot, and its computation.

    The state after the last multiple of 16 tokens is closed. For each later token (an open token),
    the layer keeps an open row: key, u, cumulated log decay G and inputs of the convolution.
    A token reads the closed state S once, and adds a sum over the open rows in ascending order:

        u_t = beta_t (v_t - mem_t)
        mem_t = exp(G_t) (S^T k_t) + sum over i < t of exp(G_t - G_i) (k_i . k_t) u_i

    The output o_t is computed like mem_t, with q_t instead of k_t and for i <= t.
    If each row of the state has a decay of its own, G is a vector:
    exp(G_t) multiplies the elements of k_t and q_t, and exp(G_t - G_i) the elements of k_i.
    The result does not depend on how a sequence is divided into steps,
    and the rows of rejected draft tokens can be dropped.
    """

    def __init__(self, op: DeltaShape, slots: int, block: int) -> None:
        self._op, self._block = op, block
        self._each = op.value_heads // op.key_heads
        channels = 2 * op.key_heads * op.key_width + op.value_heads * op.value_width
        self._state = torch.zeros(slots, op.value_heads, op.key_width, op.value_width)
        self._tail = torch.zeros(slots, op.taps - 1, channels)
        self._inputs = torch.zeros(slots, STATE_CHUNK, channels)
        self._keys = torch.zeros(slots, STATE_CHUNK, op.value_heads, op.key_width)
        self._u = torch.zeros(slots, STATE_CHUNK, op.value_heads, op.value_width)
        rows = op.key_width if op.by_row else 1
        self._decays = torch.zeros(slots, STATE_CHUNK, op.value_heads, rows)

    def closed(self, slot: int) -> tuple[Tensor, Tensor]:
        """Return views of the closed state in a slot, and of the convolution inputs before it."""
        return self._state[slot], self._tail[slot]

    def run(
        self, x: Tensor, gates: Tensor, start: int, table: Int32, gone: int, w: DeltaWeights
    ) -> Tensor:
        """Return the output [n, value_heads * value_width] for tokens start, start + 1, ...

        table: the state slot of each block of the sequence, `gone` for a block without a slot.
        """
        op, n = self._op, len(x)
        inputs, z = torch.split(x, [self._tail.shape[2], op.value_heads * op.value_width], dim=1)
        b, a = gates[:, : op.value_heads], gates[:, op.value_heads :]
        beta = op.beta * torch.sigmoid(b)
        raw, rates = (a + w.dt_bias).reshape(n, op.value_heads, -1), torch.exp(w.a_log)
        g = -rates.reshape(-1, 1) * F.softplus(raw)
        if op.bound:
            g = op.bound * torch.sigmoid(rates.reshape(-1, 1) * raw)
        out = torch.empty(n, op.value_heads, op.value_width)
        for part in parts_of(n, start, table, gone, self._block):
            rows = slice(part.first, part.end)
            given = inputs[rows], beta[rows], g[rows]
            out[rows] = self._run_rows(part.slot, part.closed, part.num_open, *given, w.conv)
        normed = out * torch.rsqrt(out.square().mean(dim=-1, keepdim=True) + op.eps) * w.norm
        gate = torch.sigmoid if op.sigmoid else F.silu
        return (normed * gate(z.reshape(out.shape))).reshape(n, -1)

    def _run_rows(
        self,
        slot: int,
        closed: int,
        num_open: int,
        x: Tensor,
        beta: Tensor,
        g: Tensor,
        conv: Tensor,
    ) -> Tensor:
        """Return the output of rows that follow the `num_open` rows in state slot `slot`.

        If the chunk is then full, its state is closed.

        closed: the state slot of the closed state, or -1 at the beginning of a sequence.
        """
        op, n = self._op, len(x)
        end = num_open + n
        self._inputs[slot, num_open:end] = x
        tail = self._tail[closed] if closed >= 0 else torch.zeros_like(self._tail[0])
        state = self._state[closed] if closed >= 0 else torch.zeros_like(self._state[0])
        known = torch.cat([tail, self._inputs[slot, :end]])
        mixed = torch.zeros_like(x)
        for tap in range(op.taps):
            mixed = mixed + conv[:, 0, tap] * known[num_open + tap : num_open + tap + n]
        width = op.key_heads * op.key_width
        sizes = [width, width, mixed.shape[1] - 2 * width]
        q, k, values = torch.split(F.silu(mixed), sizes, dim=1)
        q = self._for_values(_unit(q.reshape(n, op.key_heads, -1)) * op.key_width**-0.5)
        k = self._for_values(_unit(k.reshape(n, op.key_heads, -1)))
        values = values.reshape(n, op.value_heads, -1)
        keys, us, decays = self._keys[slot], self._u[slot], self._decays[slot]
        out = torch.empty_like(values)
        for i in range(n):
            row = num_open + i
            keys[row] = k[i]
            decays[row] = g[i] + (decays[row - 1] if row else 0)
            # since [rows, heads, 1 or key_width], total [heads, 1 or key_width]
            since, total = torch.exp(decays[row] - decays[: row + 1]), torch.exp(decays[row])
            memory = torch.einsum("hdv,hd->hv", state, total * k[i])
            kk = (since[:row] * keys[:row] * k[i]).sum(dim=2, keepdim=True)
            memory = memory + (kk * us[:row]).sum(dim=0)
            us[row] = beta[i][:, None] * (values[i] - memory)
            kq = (since * keys[: row + 1] * q[i]).sum(dim=2, keepdim=True)
            o = torch.einsum("hdv,hd->hv", state, total * q[i])
            out[i] = o + (kq * us[: row + 1]).sum(dim=0)
        if end == STATE_CHUNK:
            self._close(slot, state, known)
        return out

    def _for_values(self, x: Tensor) -> Tensor:
        """Repeat each key head of x for its value heads: [n, value_heads, ...]."""
        each = self._each
        return x.repeat(1, each, 1) if self._op.tiled else x.repeat_interleave(each, dim=1)

    def _close(self, slot: int, state: Tensor, known: Tensor) -> None:
        """Add the open rows to the closed state, and keep the last inputs of the convolution."""
        decays = self._decays[slot]
        since = torch.exp(decays[-1] - decays)
        added = torch.einsum("ihd,ihv->hdv", since * self._keys[slot], self._u[slot])
        self._state[slot] = torch.exp(decays[-1])[..., None] * state + added
        self._tail[slot] = known[STATE_CHUNK:]


def _unit(x: Tensor) -> Tensor:
    """Return x scaled to length 1 along the last dimension."""
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + LENGTH_EPS)


class ConvInputs:
    """The inputs of a short convolution that each state slot keeps.

    A slot keeps the last inputs before the chunk of 16 tokens, and the input of each open token.
    """

    def __init__(self, channels: int, taps: int, slots: int, dilation: int = 1) -> None:
        self._taps, self._dilation = taps, dilation
        self._tail = torch.zeros(slots, (taps - 1) * dilation, channels)
        self._open = torch.zeros(slots, STATE_CHUNK, channels)

    def closed(self, slot: int) -> tuple[Tensor, ...]:
        """Return a view of the last inputs before the next chunk."""
        return (self._tail[slot],)

    def run(self, x: Tensor, part: ChunkRows, weight: Tensor) -> Tensor:
        """Return the convolution of x [rows of the part, channels]; weight [channels, 1, taps]."""
        num_open, n = part.num_open, len(x)
        self._open[part.slot, num_open : num_open + n] = x
        tail = self._tail[part.closed] if part.closed >= 0 else torch.zeros_like(self._tail[0])
        known = torch.cat([tail, self._open[part.slot, : num_open + n]])
        mixed = torch.zeros_like(x)
        for tap in range(self._taps):
            first = num_open + tap * self._dilation
            mixed = mixed + weight[:, 0, tap] * known[first : first + n]
        if part.closes:
            self._tail[part.slot] = known[STATE_CHUNK:]
        return mixed


@dataclass(frozen=True, slots=True)
class Mamba2Weights:
    """The weights of a Mamba2 layer in fp32, [heads]: rates (-exp(a_log)) and d."""

    rates: Tensor
    d: Tensor


@dataclass(frozen=True, slots=True)
class Mamba2Shape:
    """The sizes of a Mamba2 layer, as in the op."""

    heads: int
    groups: int
    key_width: int
    value_width: int


class Mamba2States:
    """The states of one Mamba2 layer in each state slot, and its computation.

    For an open token, the layer keeps B, u = dt x, and G, the sum of -exp(a_log) dt
    since the chunk began. With the closed state S, the output of token t is

        o_t = exp(G_t) S^T C_t + sum over i <= t of exp(G_t - G_i) (B_i . C_t) u_i + d x_t
    """

    def __init__(self, op: Mamba2Shape, slots: int) -> None:
        self._op = op
        self._state = torch.zeros(slots, op.heads, op.key_width, op.value_width)
        self._keys = torch.zeros(slots, STATE_CHUNK, op.heads, op.key_width)
        self._u = torch.zeros(slots, STATE_CHUNK, op.heads, op.value_width)
        self._decays = torch.zeros(slots, STATE_CHUNK, op.heads)

    def closed(self, slot: int) -> tuple[Tensor, ...]:
        """Return a view of the closed state in a state slot."""
        return (self._state[slot],)

    def run(self, x: Tensor, dt: Tensor, part: ChunkRows, w: Mamba2Weights) -> Tensor:
        """Return the output [rows of the part, heads * value_width]; dt [rows, heads]."""
        op, n, each = self._op, len(x), self._op.heads // self._op.groups
        shared = op.groups * op.key_width
        values, k, q = torch.split(x, [op.heads * op.value_width, shared, shared], dim=1)
        values = values.reshape(n, op.heads, -1)
        k, q = (y.reshape(n, op.groups, -1).repeat_interleave(each, dim=1) for y in (k, q))
        g = w.rates * dt
        keys, us, decays = self._keys[part.slot], self._u[part.slot], self._decays[part.slot]
        state = torch.zeros_like(self._state[0])
        if part.closed >= 0:
            state = self._state[part.closed]
        out = torch.empty_like(values)
        for i in range(n):
            row = part.num_open + i
            keys[row], us[row] = k[i], dt[i][:, None] * values[i]
            decays[row] = g[i] + (decays[row - 1] if row else 0)
            since = torch.exp(decays[row] - decays[: row + 1])[..., None]  # [rows, heads, 1]
            kq = (keys[: row + 1] * q[i]).sum(dim=2, keepdim=True)
            o = torch.exp(decays[row])[:, None] * torch.einsum("hdv,hd->hv", state, q[i])
            out[i] = o + (since * kq * us[: row + 1]).sum(dim=0) + w.d[:, None] * values[i]
        if part.closes:
            since = torch.exp(decays[-1] - decays)[..., None]
            added = torch.einsum("ihd,ihv->hdv", keys, since * us)
            self._state[part.slot] = torch.exp(decays[-1])[:, None, None] * state + added
        return out.reshape(n, -1)


class ScanStates:
    """The states of one SelectiveScan layer in each state slot, and its computation.

    For an open token, the layer keeps b, dt and u = dt x. The states of open tokens are computed
    again from the closed state.
    """

    def __init__(self, channels: int, width: int, slots: int) -> None:
        self._state = torch.zeros(slots, channels, width)
        self._dt = torch.zeros(slots, STATE_CHUNK, channels)
        self._u = torch.zeros(slots, STATE_CHUNK, channels)
        self._keys = torch.zeros(slots, STATE_CHUNK, width)

    def closed(self, slot: int) -> tuple[Tensor, ...]:
        """Return a view of the closed state in a state slot."""
        return (self._state[slot],)

    def run(
        self, dt: Tensor, u: Tensor, keys: Tensor, queries: Tensor, part: ChunkRows, rates: Tensor
    ) -> Tensor:
        """Return the sums over n [rows of the part, channels]; rates [channels, width]."""
        rows, num_open = slice(part.num_open, part.num_open + len(dt)), part.num_open
        dts, us, bs = self._dt[part.slot], self._u[part.slot], self._keys[part.slot]
        dts[rows], us[rows], bs[rows] = dt, u, keys
        state = torch.zeros_like(self._state[0])
        if part.closed >= 0:
            state = self._state[part.closed]
        out = torch.empty_like(dt)
        for i in range(rows.stop):
            state = torch.exp(dts[i][:, None] * rates) * state + us[i][:, None] * bs[i]
            if i >= num_open:
                out[i - num_open] = state @ queries[i - num_open]
        if part.closes:
            self._state[part.slot] = state
        return out


@dataclass(frozen=True, slots=True)
class WkvRows:
    """The rows of a part, all [rows, heads, width]: see `Wkv7States`; g is the log of decays."""

    r: Tensor
    g: Tensor
    k: Tensor
    z: Tensor
    removal: Tensor
    v: Tensor


class Wkv7States:
    """The states of one Wkv7 layer in each state slot, and its computation.

    For an open token, the layer keeps its key k, the removal step z, v, m = -S^T z, and G,
    the sum of the logarithms of its decays since the chunk began.
    With the closed state S, every row y of token t is multiplied by its state as

        S_t^T y = S^T (exp(G_t) y) + sum over i <= t of (exp(G_t - G_i) k_i . y) v_i
                                                      + (exp(G_t - G_i) removal_i . y) m_i
    """

    def __init__(self, heads: int, key_width: int, value_width: int, slots: int) -> None:
        self._state = torch.zeros(slots, heads, key_width, value_width)
        self._keys = torch.zeros(slots, STATE_CHUNK, heads, key_width)
        self._removals = torch.zeros(slots, STATE_CHUNK, heads, key_width)
        self._decays = torch.zeros(slots, STATE_CHUNK, heads, key_width)
        self._values = torch.zeros(slots, STATE_CHUNK, heads, value_width)
        self._removed = torch.zeros(slots, STATE_CHUNK, heads, value_width)

    def closed(self, slot: int) -> tuple[Tensor, ...]:
        """Return a view of the closed state in a state slot."""
        return (self._state[slot],)

    def run(self, y: WkvRows, part: ChunkRows) -> Tensor:
        """Return S_t^T r_t [rows of the part, heads, value width]."""
        r, g, k, z, removal, v = y.r, y.g, y.k, y.z, y.removal, y.v
        at, first = part.slot, part.num_open
        keys, removals, decays = self._keys[at], self._removals[at], self._decays[at]
        values, removed = self._values[at], self._removed[at]
        state = torch.zeros_like(self._state[0])
        if part.closed >= 0:
            state = self._state[part.closed]
        out = torch.empty_like(v)
        for i in range(len(r)):
            row = first + i
            known = slice(0, row)
            before = decays[row - 1] if row else torch.zeros_like(g[i])
            removed[row] = -_read(
                state,
                z[i],
                before,
                decays[known],
                ((keys[known], values[known]), (removals[known], removed[known])),
            )
            keys[row], removals[row], values[row] = k[i], removal[i], v[i]
            decays[row] = before + g[i]
            known = slice(0, row + 1)
            out[i] = _read(
                state,
                r[i],
                decays[row],
                decays[known],
                ((keys[known], values[known]), (removals[known], removed[known])),
            )
        if part.closes:
            since = torch.exp(decays[-1] - decays)
            added = torch.einsum("ihd,ihv->hdv", since * keys, values)
            added += torch.einsum("ihd,ihv->hdv", since * removals, removed)
            self._state[at] = torch.exp(decays[-1])[..., None] * state + added
        return out


class Wkv6States:
    """The states of one Wkv6 layer in each state slot, and its computation.

    For an open token, the layer keeps its key k, v, and G, the sum of the logarithms of its decays
    since the chunk began.
    """

    def __init__(self, heads: int, key_width: int, value_width: int, slots: int) -> None:
        self._state = torch.zeros(slots, heads, key_width, value_width)
        self._keys = torch.zeros(slots, STATE_CHUNK, heads, key_width)
        self._decays = torch.zeros(slots, STATE_CHUNK, heads, key_width)
        self._values = torch.zeros(slots, STATE_CHUNK, heads, value_width)

    def closed(self, slot: int) -> tuple[Tensor, ...]:
        """Return a view of the closed state in a state slot."""
        return (self._state[slot],)

    def run(
        self, rows: tuple[Tensor, Tensor, Tensor, Tensor], part: ChunkRows, bonus: Tensor | None
    ) -> Tensor:
        """Return the results [rows of the part, heads, value width].

        rows: r, the logarithms of decays, k and v, all [rows of the part, heads, width].
        """
        r, g, k, v = rows
        at, first = part.slot, part.num_open
        keys, decays, values = self._keys[at], self._decays[at], self._values[at]
        state = torch.zeros_like(self._state[0])
        if part.closed >= 0:
            state = self._state[part.closed]
        out = torch.empty_like(v)
        for i in range(len(r)):
            row = first + i
            before = decays[row - 1] if row else torch.zeros_like(g[i])
            keys[row], values[row], decays[row] = k[i], v[i], before + g[i]
            # With a bonus, the state before the token is read.
            now, end = (decays[row], row + 1) if bonus is None else (before, row)
            known = (keys[:end], values[:end])
            out[i] = _read(state, r[i], now, decays[:end], (known,))
            if bonus is not None:
                out[i] += (r[i] * k[i] * bonus[0]).sum(dim=-1, keepdim=True) * v[i]
        if part.closes:
            since = torch.exp(decays[-1] - decays)
            added = torch.einsum("ihd,ihv->hdv", since * keys, values)
            self._state[at] = torch.exp(decays[-1])[..., None] * state + added
        return out


def _read(
    state: Tensor,
    y: Tensor,
    now: Tensor,
    decays: Tensor,
    added: tuple[tuple[Tensor, Tensor], ...],
) -> Tensor:
    """Return the closed state and open rows, both decayed until `now`, times y: [heads, width].

    added: pairs of open keys [rows, heads, key width] and values [rows, heads, value width].
    """
    out = torch.einsum("hdv,hd->hv", state, torch.exp(now) * y)
    since = torch.exp(now - decays)
    for keys, values in added:
        out = out + ((since * keys * y).sum(dim=2, keepdim=True) * values).sum(dim=0)
    return out
