"""Quantizing while loading: dense checkpoints whose matrices the packers turn into int8 or int4.

The packers (csrc/kernels/linear) read the checkpoint's own rows and quantize them on all threads as
they pack; here is which matrix gets which kind, and the same arithmetic in numpy, which the torch
executor and the tests compute with.

int8: one scale per output, largest magnitude / 127. int4: a scale and a minimum per 128 inputs,
over a range cut where that lessens the squared error. Both keep embedding and output head in int8
groups of 32 (GGUF's Q8_0), which few rows read and every token's choice hangs on.

Rows they multiply are int8 with a scale per 128. One scale for a whole row is 8 % faster over many
rows, and lost, on SmolLM2-135M over tests/data/fidelity.txt, 0.020 nats a token at the down
projections, 0.016 at q, k and v, 0.004 at gate and up, and nothing that could be measured at the
attention output, which alone gets it. Scales per 128 everywhere lost 0.009 there, 0.006 of them at
gate and up, groups of 32 0.003; 4-bit weights in groups of 128 themselves lose it 0.5. Small models
get groups of 32 ("int8_fine", "int4_fine").

w8a8: what compressed-tensors calls so, one scale per output and one per row in every layer, for
models that bear it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cpuserve.quant.codes import GROUP, ZERO, Codes
from cpuserve.quant.stored import QUANTIZED_KINDS

if TYPE_CHECKING:
    import numpy.typing as npt

    from cpuserve.quant.base import QuantTensor, WeightKind, Weights

    Float32 = npt.NDArray[np.float32]

BLOCK = 32  # of embedding and output head
CUTS = 4
CUT_STEP = np.float32(0.05)
ONE_SCALE = ("o_proj.weight",)
PER_TOKEN = ("embed_tokens.weight", "lm_head.weight", "wte.weight")


class OnlineWeights:
    """A checkpoint's weights with other kinds for its dense matrices; the tensors are its own."""

    def __init__(self, weights: Weights, scheme: str) -> None:
        """scheme: as EngineConfig.quantize has it, but "none"."""
        self._weights = weights
        self._scheme = scheme

    def names(self) -> set[str]:
        """Every tensor name in the checkpoint, after renaming."""
        return self._weights.names()

    def get(self, name: str) -> QuantTensor:
        """The tensor as stored; packing quantizes it."""
        return self._weights.get(name)

    def kind(self, name: str, dtype: str) -> WeightKind:
        """The scheme's kind; tensors that are quantized already keep theirs."""
        stored = self._weights.kind(name, dtype)
        if stored in QUANTIZED_KINDS.values():
            return stored
        return kind_of(name, self._scheme)


def kind_of(name: str, scheme: str) -> WeightKind:
    """The packed kind of dense matrix `name` under `scheme`."""
    if scheme == "int8_fine" or name.endswith(PER_TOKEN):
        return "w8_g32"
    if scheme == "int4_fine":
        return "w4m_g32"
    if scheme == "int4":
        return "w4m_g128"
    if scheme == "w8a8":
        return "w8_channel"
    return "w8_channel" if name.endswith(ONE_SCALE) else "w8_channel_g128"


def quantize(rows: Float32, kind: str) -> Codes:
    """fp32 `rows` as the packer of `kind` quantizes them."""
    if kind == "w8_g32":
        return quantize_groups(rows)
    if kind == "w4m_g32":
        return quantize_nibbles(rows)
    return quantize_int4(rows) if kind == "w4m_g128" else quantize_int8(rows)


def quantize_int8(rows: Float32) -> Codes:
    """One scale per row of fp32 `rows` [n, k]; codes have zero point 128."""
    scale = np.abs(rows).max(axis=1, keepdims=True) / np.float32(127)
    safe = np.where(scale > 0, scale, np.float32(1))
    q = np.clip(np.rint(rows / safe), -127, 127)
    return Codes((q + ZERO).astype(np.uint8), scale, None, rows.shape[1])


def quantize_groups(rows: Float32) -> Codes:
    """GGUF's Q8_0 of fp32 `rows` [n, k]: an fp16 scale per 32; codes have zero point 128."""
    n, k = rows.shape
    x = np.pad(rows, ((0, 0), (0, -k % BLOCK))).reshape(n, -1, BLOCK)
    amax = np.abs(x).max(axis=2)
    inverse = np.where(amax > 0, np.float32(127) / np.where(amax > 0, amax, 1), np.float32(0))
    q = np.rint(x * inverse[..., None]).reshape(n, -1)[:, :k]
    return Codes((q + ZERO).astype(np.uint8), _half(amax / np.float32(127)), None, BLOCK)


def quantize_nibbles(rows: Float32) -> Codes:
    """GGUF's Q4_1 of fp32 `rows` [n, k]: [min, max] of each 32 in 15 steps, both ends in fp16."""
    n, k = rows.shape
    x = np.pad(rows, ((0, 0), (0, -k % BLOCK))).reshape(n, -1, BLOCK)
    low = x.min(axis=2)
    step = (x.max(axis=2) - low) / np.float32(15)
    inverse = np.where(step > 0, np.float32(1) / np.where(step > 0, step, 1), np.float32(0))
    steps = (x - low[..., None]) * inverse[..., None] + np.float32(0.5)
    codes = np.clip(np.floor(steps), 0, 15).reshape(n, -1)[:, :k].astype(np.uint8)
    return Codes(codes, _half(step), _half(low), BLOCK)


def quantize_int4(rows: Float32) -> Codes:
    """A scale and a minimum, both fp16, per 128 of each row of fp32 `rows` [n, k]."""
    n, k = rows.shape
    # what lies beyond k repeats the last weight, so that it does not widen the range
    x = np.pad(rows, ((0, 0), (0, -k % GROUP)), mode="edge").reshape(n, -1, GROUP)
    real = (np.arange(x.shape[1] * GROUP) < k).reshape(-1, GROUP)
    low, high = x.min(axis=2), x.max(axis=2)
    best: list[npt.NDArray[np.float32]] = []
    for i in range(CUTS + 1):
        cut = (high - low) * (np.float32(0.5) * CUT_STEP * np.float32(i))
        scale = _half((high - low - np.float32(2) * cut) / np.float32(15))
        minimum = _half(low + cut)
        inverse = np.where(scale > 0, np.float32(1) / np.where(scale > 0, scale, 1), np.float32(0))
        codes = np.clip(np.rint((x - minimum[..., None]) * inverse[..., None]), 0, 15)
        off = x - (codes * scale[..., None] + minimum[..., None])
        error = np.where(real, np.square(off), 0).sum(axis=2)
        if not best:
            best = [error, codes, scale, minimum]
            continue
        better = error < best[0]
        best[1] = np.where(better[..., None], codes, best[1])
        for at, new in ((0, error), (2, scale), (3, minimum)):
            best[at] = np.where(better, new, best[at])
    codes = best[1].reshape(n, -1)[:, :k].astype(np.uint8)
    return Codes(codes, best[2].astype(np.float32), best[3].astype(np.float32), GROUP)


def _half(x: Float32) -> Float32:
    return x.astype(np.float16).astype(np.float32)
