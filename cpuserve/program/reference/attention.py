"""Storage of keys and values in torch, and a softmax in chunks as the kernels compute it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

BLOCK = 32  # tokens of a KV block (kBlock in C++)
CHUNK = 256  # keys of an attention chunk (kChunk in C++)
QUERIES_AT_ONCE = 128  # queries of a sequence; limits the memory of scores [queries, heads, keys]
# The storage dtype for each KV type. torch cannot index fp8 tensors, so fp8 is stored as bytes.
KV_DTYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "fp8_e4m3": torch.uint8,
    "int8_v4": torch.int8,  # values are stored as their levels, a byte each
}
# Keys are multiplied by a Hadamard matrix, queries by its inverse.
MIXED_KV = ("int8", "int8_v4")
MIXED_VALUES = ("int8_v4",)  # the same for values and outputs, except in latent layers
SCALED_KV = {"int8": 127.0, "fp8_e4m3": 448.0, "int8_v4": 127.0}  # the largest code of a key
LEVELS = (6.0, 18.0, 31.0, 45.0, 59.0, 76.0, 97.0, 127.0)  # of 4-bit values, and their negatives
FP8 = {"fp8_e4m3": torch.float8_e4m3fn}


def visible(distance: Tensor, window: int, *, causal: bool) -> Tensor:
    """Return a mask [n, keys] that is True for the keys that a query may see.

    distance: query position - key position, [n, keys].
    window: a query sees keys less than this many tokens away (0 = no limit).
    """
    if not causal:
        distance = distance.abs()  # the window of an encoder reaches to both sides
    seen = distance >= 0
    return seen & (distance < window) if window else seen


def ends_of_spans(positions: Tensor, media_rows: npt.NDArray[np.int32]) -> Tensor:
    """Return the position after the last key that each token of a sequence sees.

    Neighbouring tokens with rows of the media buffer (0 or more) see each other.
    """
    ends = positions + 1
    for t in range(len(ends) - 2, -1, -1):
        if media_rows[t] >= 0 and media_rows[t + 1] >= 0:
            ends[t] = ends[t + 1]
    return ends


def mix_width(head_dim: int) -> int:
    """Return the size of the Hadamard matrix of `mix`: the largest 2^n that divides head_dim."""
    return head_dim & -head_dim


def mix(x: Tensor) -> Tensor:
    """Multiply each block of mix_width(d) columns of x [T, heads, d] by a Hadamard matrix.

    The matrix has the entries 1 and -1.
    """
    n, h = mix_width(x.shape[2]), torch.ones(1, 1)
    while len(h) < n:
        h = torch.cat([torch.cat([h, h], dim=1), torch.cat([h, -h], dim=1)])
    return (x.reshape(*x.shape[:2], -1, n) @ h).reshape(x.shape)


def encode_kv(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Quantize x [T, heads, d] to 8 bits; return (codes, scale [T, heads]), x ~ codes * scale."""
    largest, top = SCALED_KV[kind], x.abs().amax(dim=2)
    factor = torch.where(top > 0, torch.tensor(largest) / top, 0.0)
    codes = x * factor[..., None]
    return codes.to(FP8[kind]) if kind in FP8 else codes.round().to(torch.int8), top / largest


def encode_levels(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x [T, heads, d] to 16 levels; return (levels, scale [T, heads]), x ~ levels * scale.

    The scale is the best of three, fitted to the levels (encode_levels in kernels/generic/kv8.h).
    """
    sizes, top = torch.tensor(LEVELS), x.abs().amax(dim=2)
    middles = (sizes[1:] + sizes[:-1]) / 2
    best, scale, kept = -torch.ones_like(top), torch.zeros_like(top), torch.zeros_like(x)
    for share in (1.0, 0.9, 0.8):
        y = x * torch.where(top > 0, LEVELS[-1] / (top * share), 0.0)[..., None]
        levels = sizes[torch.bucketize(y.abs(), middles)]
        levels = torch.where(y < 0, -levels, levels)
        product, square = (x * levels).sum(dim=2), (levels * levels).sum(dim=2)
        better = product * product > best * square
        best = torch.where(better, product * product / square, best)
        scale = torch.where(better, product / square, scale)
        kept = torch.where(better[..., None], levels, kept)
    return kept.to(torch.int8), scale


def chunked_softmax(
    s: Tensor,
    v: Tensor,
    sink: Tensor | None,
    *,
    round_p: bool = False,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Return softmax(s) v, computed for each chunk of 256 keys and merged in ascending order.

    s [n, heads, keys] is -inf at masked keys; v [keys, heads, d]; sink [n, heads, 1] or None.
    With round_p, the probabilities are multiplied by v_scale [keys, heads], if any,
    and rounded to bf16 before they multiply v.
    The denominators use fp32 probabilities without v_scale.
    """
    n, heads, keys = s.shape
    top = torch.full((n, heads, 1), -torch.inf) if sink is None else sink
    total = torch.full((n, heads, 1), 0.0 if sink is None else 1.0)
    out = torch.zeros(n, heads, v.shape[2])
    for start in range(0, keys, CHUNK):
        part, values = s[:, :, start : start + CHUNK], v[start : start + CHUNK]
        part_top = part.amax(dim=2, keepdim=True)
        seen = part_top > -torch.inf
        p = torch.where(seen, torch.exp(part - torch.where(seen, part_top, 0.0)), 0.0)
        part_total = p.sum(dim=2, keepdim=True)
        if v_scale is not None:
            p = p * v_scale[start : start + CHUNK].T
        if round_p:
            p = p.bfloat16().float()
        new_top = torch.maximum(top, part_top)
        safe = torch.where(new_top > -torch.inf, new_top, 0.0)
        keep, take = torch.exp(top - safe), torch.exp(part_top - safe)
        total = total * keep + part_total * take
        out = out * keep + torch.einsum("nhk,khd->nhd", p, values) * take
        top = new_top
    return out / total
