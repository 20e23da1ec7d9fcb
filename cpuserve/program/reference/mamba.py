"""The reference of short convolutions and Mamba2, in torch: closed states and open tokens.

As in DeltaStates (recurrent.py), a layer keeps a closed state (after a multiple of 16 tokens)
and an open row for each open token: the data of a token that comes after the closed state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from cpuserve.config.cache_groups import STATE_CHUNK
from cpuserve.program.reference.recurrent import ChunkRows


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
    """The weights of a Mamba2 layer in fp32, with the names of the fields of the op."""

    a_log: Tensor
    dt_bias: Tensor
    d: Tensor


@dataclass(frozen=True, slots=True)
class Mamba2Shape:
    """The sizes of a Mamba2 layer and the limits of its step sizes, as in the op."""

    heads: int
    groups: int
    key_width: int
    value_width: int
    low: float
    high: float


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

    def run(self, x: Tensor, steps: Tensor, part: ChunkRows, w: Mamba2Weights) -> Tensor:
        """Return the output [rows of the part, heads * value_width]; steps [rows, heads]."""
        op, n, each = self._op, len(x), self._op.heads // self._op.groups
        shared = op.groups * op.key_width
        values, k, q = torch.split(x, [op.heads * op.value_width, shared, shared], dim=1)
        values = values.reshape(n, op.heads, -1)
        k, q = (y.reshape(n, op.groups, -1).repeat_interleave(each, dim=1) for y in (k, q))
        dt = F.softplus(steps + w.dt_bias).clamp(op.low, op.high)
        g = -torch.exp(w.a_log) * dt
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
