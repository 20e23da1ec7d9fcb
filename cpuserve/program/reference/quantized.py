"""Products with quantized matrices in torch, rounded where the kernels round (table/weights.h)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

GROUP = 32  # weights that share a scale in GGUF formats
GROUP128 = 128  # inputs that share a scale in rows of format q8g128
GROUP256 = 256  # inputs that share a scale in rows of format q8g256
ROWS_AT_ONCE = 4096  # rows of a 16-bit matrix that are fp32 at the same time; limits memory


@dataclass(frozen=True, slots=True)
class QuantMatrix:
    """A matrix quantized in groups along k: w = scale * (codes - zero) + minimum.

    codes [n, k] are uint8, or bf16 if the codes are floats. scale and minimum (or None) are fp32
    [n, groups], each for `group` weights; the last group of a row may be shorter. order [k]:
    column i of the codes multiplies input order[i] (None: input i).
    """

    codes: Tensor
    scale: Tensor
    zero: int
    minimum: Tensor | None = None
    group: int = GROUP
    order: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """Return the shape [n, k]."""
        return self.codes.shape

    def rows(self, index: Tensor | slice) -> Tensor:
        """Return rows of the matrix in fp32."""
        out = (self.codes[index].float() - self.zero) * self._spread(self.scale[index])
        if self.minimum is not None:
            out += self._spread(self.minimum[index])
        return out if self.order is None else torch.empty_like(out).index_copy_(1, self.order, out)

    def _spread(self, per_group: Tensor) -> Tensor:
        return per_group.repeat_interleave(self.group, dim=1)[:, : self.codes.shape[1]]


Matrix: TypeAlias = Tensor | QuantMatrix


def row_blocks(weight: Matrix) -> list[slice]:
    """Return ranges of at most ROWS_AT_ONCE rows, which are converted to fp32 one after another."""
    return [slice(a, a + ROWS_AT_ONCE) for a in range(0, weight.shape[0], ROWS_AT_ONCE)]


def quantize_rows(x: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize rows x to int8 with one scale for each `group` inputs.

    Returns (q [T, groups, group], scale [T, groups], sum of q [T, groups]).
    """
    x = F.pad(x, (0, -x.shape[1] % group)).reshape(len(x), -1, group)
    amax = x.abs().amax(dim=2)
    # torch computes number / tensor as number * (1 / tensor), which rounds twice.
    # Therefore both operands are tensors.
    inverse = torch.where(amax > 0, torch.tensor(127.0) / amax, 0.0)
    q = torch.round(x * inverse[..., None])
    return q, amax / 127.0, q.sum(dim=2)


def multiply_grouped(x: Tensor, weight: QuantMatrix, group: int) -> Tensor:
    """Return x W^T for weight kinds with groups (table/weights.h), summed in group order.

    `group` inputs of x share a scale.
    Sums of products of int8 and codes stay below 2^24, so they are exact in fp32.
    A fused multiply-add is emulated as an fp64 product and sum that is rounded once to fp32.
    Kernels sum the groups of a block of 256 inputs in integers, and round once, not 8 or 16 times.
    """
    q, x_scale, _ = quantize_rows(x, group)
    parts = q.shape[2] // weight.group
    q = q.reshape(len(x), -1, weight.group)
    x_scale, x_sum = x_scale.repeat_interleave(parts, dim=1), q.sum(dim=2)
    n, codes = weight.shape[0], centered(weight, weight.group)
    out = torch.zeros(len(x), n)
    for g in range(codes.shape[1]):
        dot = q[:, g] @ codes[:, g].T
        out = _fma(dot, x_scale[:, g, None] * weight.scale[None, :, g], out)
        if weight.minimum is not None:
            shift = (x_scale[:, g] * x_sum[:, g])[:, None]
            out = _fma(weight.minimum[None, :, g], shift, out)
    return out


def multiply_channel(x: Tensor, weight: QuantMatrix, group: int) -> Tensor:
    """Return x W^T for w8_channel (group 0: one scale for each row of x) and w8_channel_g128."""
    q, x_scale, _ = quantize_rows(x, group or x.shape[1])
    codes = centered(weight, group or x.shape[1])
    if not group:
        dot = (q[:, 0].double() @ codes[:, 0].double().T).float()
        return dot * (weight.scale.T * x_scale)
    out = torch.zeros(len(x), weight.shape[0])
    for g in range(q.shape[1]):
        out = _fma(q[:, g] @ codes[:, g].T, x_scale[:, g, None], out)
    return out * weight.scale.T


def centered(weight: QuantMatrix, group: int) -> Tensor:
    """Return codes - zero in fp32 as [n, groups, group], padded with zeros."""
    codes = weight.codes.float() - weight.zero
    return F.pad(codes, (0, -codes.shape[1] % group)).reshape(len(codes), -1, group)


def multiply_two_terms(x: Tensor, weight: QuantMatrix, group: int) -> Tensor:
    """Return x W^T with x as the sum of two int8 terms: x quantized, and its error quantized."""
    q, scale, _ = quantize_rows(x, group)
    kept = (q * scale[..., None]).reshape(len(x), -1)[:, : x.shape[1]]
    return multiply_grouped(x, weight, group) + multiply_grouped(x - kept, weight, group)


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return (a.double() * b.double() + c.double()).float()
