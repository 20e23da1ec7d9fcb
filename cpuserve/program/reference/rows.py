"""Norms, rotations, activations and n-gram embeddings of rows in torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from cpuserve.config.cache_groups import STATE_CHUNK
from cpuserve.program.ops import ACTIVATIONS, SWIGLU_ALPHA, SWIGLU_LIMIT, Then
from cpuserve.program.reference.recurrent import ChunkRows


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate dims i and i + rotary / 2 of x [T, heads, d]; cos and sin are [T, 1, rotary / 2]."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def rotate_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last dims of x [T, heads, d], each two neighbours as a pair."""
    first = x.shape[-1] - 2 * cos.shape[-1]
    a, b = x[..., first::2], x[..., first + 1 :: 2]
    pairs = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1)
    return torch.cat([x[..., :first], pairs.flatten(-2)], dim=-1)


def activate(x: Tensor, then: Then) -> Tensor:
    """Apply the activation of Linear and ActivationOp; "*_mul" is act(first half) * second half."""
    if then.endswith("_mul"):
        gate, up = x.chunk(2, dim=1)
        if then == "clamped_swiglu_mul":
            gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
            return gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)
        return ACTIVATIONS[then.removesuffix("_mul")](F, gate) * up
    return ACTIVATIONS[then](F, x)


def soften(x: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(x / cap), or x if cap is 0."""
    return cap * torch.tanh(x / cap) if cap > 0 else x


class LastIds:
    """The token ids that each state slot keeps.

    A slot keeps the last ids before the chunk of 16 tokens, and the id of each later token.

    A stored number is the id + 1, or 0 for a token before the sequence.
    """

    def __init__(self, kept: int, slots: int) -> None:
        self._tail = torch.zeros(slots, kept)
        self._open = torch.zeros(slots, STATE_CHUNK)

    def closed(self, slot: int) -> tuple[Tensor, ...]:
        """Return a view of the last ids before the next chunk."""
        return (self._tail[slot],)

    def run(self, ids: Tensor, part: ChunkRows, end: int) -> Tensor:
        """Return [rows, kept + 1]: in a row the id of a token, the id before it, and so on.

        Tokens before the sequence, and tokens before the last `end`, count as `end`.
        """
        num_open, n, kept = part.num_open, len(ids), self._tail.shape[1]
        self._open[part.slot, num_open : num_open + n] = ids + 1
        tail = self._tail[part.closed] if part.closed >= 0 else torch.zeros(kept)
        known = torch.cat([tail, self._open[part.slot, : num_open + n]]).long() - 1
        known = torch.where(known < 0, end, known)
        columns = [known[kept + num_open :]]
        ended = torch.zeros(n, dtype=torch.bool)
        for back in range(1, kept + 1):
            first = kept + num_open - back
            before = torch.where(ended, end, known[first : first + n])
            columns.append(before)
            ended = before == end
        if part.closes:
            self._tail[part.slot] = self._open[part.slot, STATE_CHUNK - kept :]
        return torch.stack(columns, dim=1)
