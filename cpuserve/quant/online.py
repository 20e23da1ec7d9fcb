"""Online quantization: int8 or int4 matrices are made of a dense checkpoint while it is loaded.

The packers (csrc/kernels/linear) read the rows of the checkpoint,
and quantize them on all threads while they pack. This file selects the weight kind of each matrix.
The file has the same arithmetic in numpy as well, for the torch executor and the tests.

int8: one scale per output: its largest absolute weight / 127.
int4: a scale and a minimum per 128 inputs. The range is clipped if that reduces the squared error.
Both schemes keep the embedding and the output head in int8,
since their precision affects the choice of every token. A row of the embeddings of all layers
(Gemma 3n and 4) has embeddings that may differ in magnitude, so one scale must not cover them.
The Program knows the use of each matrix (`WeightNeed.use`).

Activations are int8 rows with one scale per 128 inputs. The losses below are in nats per token,
compared with fp32, on SmolLM2-135M over tests/data/fidelity.txt. One activation
scale per row is 8 % faster with many rows. But one scale per row lost 0.020 in down projections,
0.016 in q, k and v, and 0.004 in gate and up. It lost nothing measurable in the attention output,
so only the attention output has one scale per row. Activation scales per 128 inputs
in all layers lost 0.009 (0.006 of it in gate and up), and scales per 32 inputs lost 0.003.
4-bit weights in groups of 128 lost 0.5, so small models get groups of 32 ("int8_fine" and so on).
In the output head, groups of 32 are no more accurate than one scale per output (losses of 0.0150
and 0.0136 with int8, 0.5534 and 0.5545 with int4), but every step has 6 % more bytes to read.
Embeddings have the weight kind of the output head, since most heads are tied to them.

int4_mixed: like int4, but with int8 for the matrices with a use in SENSITIVE.
Errors in their outputs reach every later layer (down projections),
or every later token that attends to this one (values). Small models lose more by 4 bits. For them,
int4 already keeps SENSITIVE in int8, and int4_mixed also keeps every second layer in int8.
On SmolLM2-135M, 4 bits in groups of 32 in all matrices of the layers cost 9.6 % more nats per token
than bf16 weights, and 4.2 % more with SENSITIVE in int8 (benchmarks/weight_loss.py).

w8a8: the scheme of this name in compressed-tensors, with one scale per output
and one scale per activation row in every layer, for models that tolerate it.

The copies that `cpuserve quantize` writes have integer zero points instead of minimums
(`quantize_zeros`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cpuserve.quant.codes import GROUP, ZERO, Codes
from cpuserve.quant.stored import DENSE_KINDS

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from cpuserve.program.program import Use, WeightNeed
    from cpuserve.program.weight_kinds import WeightKind
    from cpuserve.quant.base import QuantTensor, Weights

    Float32 = npt.NDArray[np.float32]

BLOCK = 32  # number of inputs in a group of the schemes with names in "_fine"
CUTS = 4  # the number of clipped ranges that 4-bit quantization tries for a group
CUT_STEP = np.float32(0.05)  # each range is narrower than the last by this part of the full range
# The significant bits of a scale with a zero point.
# A zero point has 4 bits, so scale * zero has at most the 11 bits of fp16.
# A reader that stores this product in fp16, or the scale in bf16, is exact.
SCALE_BITS = 7
MOST_SCALE = np.float32(4096)  # the largest scale: 15 times this scale is within fp16
MIXED = "int4_mixed"
FINE = "_fine"
SENSITIVE = ("down", "values")
PER_TOKEN = ("embedding", "layers", "head")  # each scheme stores them with 8 bits
LAYER = re.compile(r"\.(\d+)\.")  # the number of the layer in a name
# A step of a tower has many rows for each matrix, so its time depends on the multiplications alone,
# and fewer bytes would not make it faster. Scales for groups of 32 inputs made it 1.5 times slower.
TOWER_KIND: WeightKind = "w8_channel_g128"


class OnlineWeights:
    """The weights of a checkpoint, with dense matrices packed into quantized kinds."""

    def __init__(
        self,
        weights: Weights,
        needs: Iterable[WeightNeed],
        scheme: str,
        tower: tuple[str, ...] = (),
        tower_scheme: str = "none",
    ) -> None:
        """needs: the weights of the Program, which knows the use of each matrix.

        scheme: a value of EngineConfig.quantize; tower_scheme: of EngineConfig.tower_quantize.
        tower: the beginnings of the tensor names of the tower.
        """
        self._weights = weights
        self._uses: dict[str, Use] = {need.name: need.use for need in needs}
        self._scheme = scheme
        self._tower = tower
        self._tower_scheme = tower_scheme

    def names(self) -> set[str]:
        """Return the name of each tensor in the checkpoint, after renaming."""
        return self._weights.names()

    def get(self, name: str) -> QuantTensor:
        """Return the tensor as it is stored; packing quantizes it."""
        return self._weights.get(name)

    def kind(self, name: str, dtype: str) -> WeightKind:
        """Return the weight kind of the scheme; a tensor quantized in the file keeps its kind."""
        stored, use = self._weights.kind(name, dtype), self._uses.get(name, "linear")
        if use == "exact" or stored not in DENSE_KINDS.values():
            return stored
        if name.startswith(self._tower):
            return stored if self._tower_scheme == "none" else TOWER_KIND
        return stored if self._scheme == "none" else kind_of(name, use, self._scheme)


def kind_of(name: str, use: Use, scheme: str) -> WeightKind:
    """Return the weight kind of a dense matrix with the scheme `scheme`."""
    if scheme.startswith("int4"):
        fine = FINE if scheme.endswith(FINE) else ""
        scheme = ("int8" if _in_8_bits(name, use, scheme) else "int4") + fine
    if use == "layers":
        return "w8_g32"
    per_token = use in PER_TOKEN
    if scheme.endswith(FINE):
        return "w8_g32" if per_token or scheme.startswith("int8") else "w4m_g32"
    if per_token:
        return "w8_channel_g128"
    if scheme == "int4":
        return "w4m_g128"
    if scheme == "w8a8":
        return "w8_channel"
    return "w8_channel" if use == "output" else "w8_channel_g128"


def _in_8_bits(name: str, use: Use, scheme: str) -> bool:
    """Whether an int4 scheme stores matrix `name` of a layer with 8 bits."""
    mixed, fine = scheme.startswith(MIXED), scheme.endswith(FINE)
    layer = LAYER.search(name)
    if mixed and fine and layer and int(layer[1]) % 2:
        return True
    return (mixed or fine) and use in SENSITIVE


def quantize(rows: Float32, kind: str) -> Codes:
    """Return fp32 `rows` quantized exactly as the packer of the weight kind `kind` does it."""
    if kind == "w8_g32":
        return quantize_groups(rows)
    if kind == "w4m_g32":
        return quantize_nibbles(rows)
    return quantize_int4(rows) if kind == "w4m_g128" else quantize_int8(rows)


def quantize_int8(rows: Float32) -> Codes:
    """Return fp32 `rows` [n, k] quantized with one scale per row; the code 128 is the value 0."""
    scale = np.abs(rows).max(axis=1, keepdims=True) / np.float32(127)
    safe = np.where(scale > 0, scale, np.float32(1))
    q = np.clip(np.rint(rows / safe), -127, 127)
    return Codes((q + ZERO).astype(np.uint8), scale, None, rows.shape[1])


def quantize_groups(rows: Float32) -> Codes:
    """Return fp32 `rows` [n, k] as Q8_0 of GGUF: an fp16 scale per 32 inputs; the code 128 is 0."""
    n, k = rows.shape
    x = np.pad(rows, ((0, 0), (0, -k % BLOCK))).reshape(n, -1, BLOCK)
    amax = np.abs(x).max(axis=2)
    inverse = np.where(amax > 0, np.float32(127) / np.where(amax > 0, amax, 1), np.float32(0))
    q = np.rint(x * inverse[..., None]).reshape(n, -1)[:, :k]
    return Codes((q + ZERO).astype(np.uint8), _half(amax / np.float32(127)), None, BLOCK)


def quantize_nibbles(rows: Float32) -> Codes:
    """Return fp32 `rows` [n, k] as Q4_1 of GGUF: an fp16 scale and minimum per 32 inputs.

    The scale is a fifteenth of the distance from the minimum to the maximum.
    """
    n, k = rows.shape
    x = np.pad(rows, ((0, 0), (0, -k % BLOCK))).reshape(n, -1, BLOCK)
    low = x.min(axis=2)
    step = (x.max(axis=2) - low) / np.float32(15)
    inverse = np.where(step > 0, np.float32(1) / np.where(step > 0, step, 1), np.float32(0))
    steps = (x - low[..., None]) * inverse[..., None] + np.float32(0.5)
    codes = np.clip(np.floor(steps), 0, 15).reshape(n, -1)[:, :k].astype(np.uint8)
    return Codes(codes, _half(step), _half(low), BLOCK)


def quantize_int4(rows: Float32) -> Codes:
    """Return fp32 `rows` [n, k] in 4 bits, with an fp16 scale and minimum per 128 inputs."""
    n, k = rows.shape
    # The padding repeats the last weight, so it does not widen the range of its group.
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


class Zeros(NamedTuple):
    """A matrix [n, k] of 4-bit codes: w = scale * (codes - zero).

    codes [n, k], zero [n, groups]: uint8 below 16. scale [n, groups]: fp32.
    """

    codes: npt.NDArray[np.uint8]
    scale: Float32
    zero: npt.NDArray[np.uint8]


def quantize_zeros(rows: Float32, group: int, *, symmetric: bool = False) -> Zeros:
    """Return fp32 `rows` [n, k] in 4 bits, with a scale and integer zero point per `group` inputs.

    The range of a group includes 0, and is clipped if that reduces the squared error, as in
    `quantize_int4`; k is a multiple of `group`. The scale is infinite if weights are too large.

    symmetric: whether all zero points are 8.
    """
    n, k = rows.shape
    # Each group becomes a column, so that the inner loops of numpy run over all groups.
    x = np.ascontiguousarray(rows.reshape(-1, group).T)
    low = np.minimum(x.min(axis=0), np.float32(0))
    high = np.maximum(x.max(axis=0), np.float32(0))
    if symmetric:
        high = np.maximum(high, -low)
        low = -high
    best_error = np.full(low.shape, np.inf, np.float32)
    best_scale, best_zero = np.zeros_like(low), np.zeros_like(low)
    steps, off = np.empty_like(x), np.empty_like(x)
    for i in range(CUTS + 1):
        cut = (high - low) * (np.float32(0.5) * CUT_STEP * np.float32(i))
        scale = _short((high - low - np.float32(2) * cut) / np.float32(15))
        inverse = _inverse(scale)
        zero = np.clip(np.rint(-(low + cut) * inverse), 0, 15)
        if symmetric:
            zero = np.full_like(zero, 8)
        _steps(x, inverse, zero, steps)
        np.multiply(steps, scale, out=off)
        np.subtract(x, off, out=off)
        error = np.einsum("ij,ij->j", off, off)
        better = (error < best_error) | (i == 0)  # the first range counts, even if its scale is inf
        best_error[better] = error[better]
        best_scale[better], best_zero[better] = scale[better], zero[better]
    _steps(x, _inverse(best_scale), best_zero, steps)
    steps += best_zero
    codes = np.ascontiguousarray(steps.astype(np.uint8).T).reshape(n, k)
    return Zeros(codes, best_scale.reshape(n, -1), best_zero.astype(np.uint8).reshape(n, -1))


def _steps(x: Float32, inverse: Float32, zero: Float32, out: Float32) -> None:
    """Write code - zero for each x to `out`; x, out: [group, groups], inverse, zero: [groups]."""
    np.multiply(x, inverse, out=out)
    np.rint(out, out=out)
    np.maximum(out, -zero, out=out)
    np.minimum(out, np.float32(15) - zero, out=out)


def _inverse(scale: Float32) -> Float32:
    return np.where(scale > 0, np.float32(1) / np.where(scale > 0, scale, 1), np.float32(0))


def _short(x: Float32) -> Float32:
    """Return x rounded to SCALE_BITS significant bits and to fp16; inf beyond MOST_SCALE."""
    dropped = 24 - SCALE_BITS
    bits = x.view(np.uint32) + np.uint32(1 << (dropped - 1))
    short = _half((bits & np.uint32(-(1 << dropped) & 0xFFFFFFFF)).view(np.float32))
    return np.where(short <= MOST_SCALE, short, np.float32(np.inf))


def _half(x: Float32) -> Float32:
    return x.astype(np.float16).astype(np.float32)
