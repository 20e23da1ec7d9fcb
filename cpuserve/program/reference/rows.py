"""Norms, rotations and activations of rows in torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from cpuserve.program.ops import SWIGLU_ALPHA, SWIGLU_LIMIT, Then


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate dims i and i + rotary / 2 of x [T, heads, d]; cos and sin are [T, 1, rotary / 2]."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def activate(x: Tensor, then: Then) -> Tensor:
    """Apply the activation of Linear and ActivationOp; "*_mul" is act(first half) * second half."""
    if then.endswith("_mul"):
        gate, up = x.chunk(2, dim=1)
        if then == "clamped_swiglu_mul":
            gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
            return gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)
        return _FUNCTIONS[then.removesuffix("_mul")](gate) * up
    return _FUNCTIONS[then](x)


def soften(x: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(x / cap), or x if cap is 0."""
    return cap * torch.tanh(x / cap) if cap > 0 else x
