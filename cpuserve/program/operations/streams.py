"""Hyper-connections: a row has several residual streams, which are equal parts of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpuserve.base.errors import ModelError
from cpuserve.program.base_builder import BaseBuilder
from cpuserve.program.ops import Op, ValueId

if TYPE_CHECKING:
    from torch import Tensor

    from cpuserve.program.interpret import Interpreter
    from cpuserve.program.lower import Lowering

ALL_PARTS = 3  # of StreamWeights: weights of inputs, weights of outputs, and a matrix
MOST_STREAMS = 8  # kMaxStreams in csrc/runtime/operations/streams.h
LEAST_GATE = 1e-6  # the least |d| of GateStreams, kLeastGate in csrc/runtime/operations/streams.cpp


class StreamWeights(Op, frozen=True):
    """Turn products of the streams into the weights of n streams around a layer, in place.

    x [T, n * width] has the streams. weights [T, n + n + n * n] is the product of a matrix and x.
    With z = weights / sqrt(mean(x^2) + eps) * scales + base, the columns become:
    sigmoid(z) + floor, the weight of each stream in the layer's input;
    2 sigmoid(z), the weight of the layer's output in each stream;
    and a matrix [n, n], where row j has the weights of stream j in the new streams.
    The rows of the matrix are softmax(z) + floor. Then each column is divided by (its sum + floor),
    then each row, and so on, until the columns were divided `rounds` times.
    scales [3], base [n + n + n * n].
    Source: transformers modeling_glm5_next (mHC, Xie et al. 2026).

    parts: 3 = as above. 2 = there is no matrix, and the weights of the layer's output are
      most * sigmoid(z) + floor. 1 = there are only the weights of the input.
      weights, base and scales then have the columns of these parts only.
    most: the factor of the sigmoid in the weights of the output.
    Source of these parameters: transformers modeling_hy_v4.
    """

    reads_of = ("x", "weights")
    write_of = "weights"

    x: ValueId
    weights: ValueId
    streams: int
    scales: str
    base: str
    rounds: int
    eps: float
    floor: float
    parts: int = ALL_PARTS
    most: float = 2.0

    def lower(self, to: Lowering) -> None:
        columns = weight_columns(self.streams, self.parts)
        to.add(self, scales=to.plain(self.scales, self.parts), base=to.plain(self.base, columns))

    def reference(self, at: Interpreter, x: Tensor, weights: Tensor) -> Tensor:
        import torch

        n, floor = self.streams, self.floor
        counts = torch.tensor([n, n, n * n][: self.parts])
        scales = at.vector(self.scales).repeat_interleave(counts)
        z = weights * torch.rsqrt(x.square().mean(dim=1, keepdim=True) + self.eps)
        z = z * scales + at.vector(self.base)
        first, second = torch.sigmoid(z[:, :n]) + floor, torch.sigmoid(z[:, n : 2 * n])
        if self.parts < ALL_PARTS:
            return torch.cat([first, self.most * second + floor], dim=1)
        mix = torch.softmax(z[:, 2 * n :].reshape(-1, n, n), dim=2) + floor
        mix = mix / (mix.sum(dim=1, keepdim=True) + floor)
        for _ in range(self.rounds - 1):
            mix = mix / (mix.sum(dim=2, keepdim=True) + floor)
            mix = mix / (mix.sum(dim=1, keepdim=True) + floor)
        return torch.cat([first, self.most * second, mix.reshape(-1, n * n)], dim=1)


def weight_columns(streams: int, parts: int) -> int:
    """Return how many weights `StreamWeights` makes for each token."""
    return streams * (streams + 2 if parts == ALL_PARTS else parts)


class MergeStreams(Op, frozen=True):
    """out = scale * (sum over i of weights[:, i] * stream i of x); no `weights`: factors are 1.

    x [T, streams * width], out [T, width].
    """

    x: ValueId
    out: ValueId
    width: int
    weights: ValueId | None = None
    scale: float = 1.0

    def reads(self) -> tuple[ValueId, ...]:
        """Return x, and the weights if there are any."""
        return (self.x,) if self.weights is None else (self.x, self.weights)

    def reference(self, at: Interpreter, x: Tensor, weights: Tensor | None = None) -> Tensor:
        streams = x.reshape(len(x), -1, self.width)
        if weights is not None:
            streams = streams * weights[:, : streams.shape[1], None]
        return streams.sum(dim=1) * self.scale


class SpreadStreams(Op, frozen=True):
    """Add y [T, width] to each stream of x [T, n * width], in place.

    mixed: whether `weights` come from `StreamWeights`.
      If so, stream i becomes weights[n + i] y + sum over j of weights[2 n + j n + i] stream j.
      If not, 2 sigmoid(weights[i]) y is added to stream i.
    given: weights[n + i] y is added to stream i, with weights of `StreamWeights` without a matrix.
    """

    reads_of = ("y", "weights", "x")
    write_of = "x"

    x: ValueId
    y: ValueId
    weights: ValueId
    width: int
    mixed: bool
    given: bool = False

    def reference(self, at: Interpreter, y: Tensor, weights: Tensor, x: Tensor) -> Tensor:
        import torch

        streams = x.reshape(len(x), -1, self.width)
        n = streams.shape[1]
        if self.mixed:
            mix = weights[:, 2 * n :].reshape(-1, n, n)
            out = mix.transpose(1, 2) @ streams + weights[:, n : 2 * n, None] * y[:, None]
        else:
            by = weights[:, n : 2 * n] if self.given else 2 * torch.sigmoid(weights)
            out = streams + by[..., None] * y[:, None]
        return out.reshape(x.shape)


class GateStreams(Op, frozen=True):
    """Stream i of out [T, n * width] is sigmoid(g) values, with a gate g for each stream.

    d = (stream i of keys) . (stream i of queries) / sqrt(width), and g has the sign of d
    and the size sqrt(max(|d|, 1e-6)). keys and queries [T, n * width], values [T, width].
    Source: transformers modeling_qwen4_exp.
    """

    reads_of = ("keys", "queries", "values")

    keys: ValueId
    queries: ValueId
    values: ValueId
    out: ValueId
    width: int

    def reference(self, at: Interpreter, keys: Tensor, queries: Tensor, values: Tensor) -> Tensor:
        import torch

        products = (keys * queries).reshape(len(keys), -1, self.width).sum(dim=2)
        d = products / self.width**0.5
        gates = d.abs().clamp(min=LEAST_GATE).sqrt() * d.sign()
        return (torch.sigmoid(gates)[..., None] * values[:, None]).reshape(keys.shape)


class StreamsBuilder(BaseBuilder):
    """Appends operations of hyper-connections."""

    def stream_weights(
        self,
        x: ValueId,
        weights: ValueId,
        *,
        scales: str,
        base: str,
        rounds: int,
        floor: float,
        parts: int = ALL_PARTS,
        most: float = 2.0,
    ) -> None:
        """Turn `weights` [T, n (n + 2)] into the weights of the n streams of x, in place.

        scales, base: the names of vectors. For all arguments see the op `StreamWeights`.
        """
        columns, counts = self._width(weights), range(1, MOST_STREAMS + 1)
        streams = next((n for n in counts if weight_columns(n, parts) == columns), 0)
        if not streams or self._width(x) % streams:
            msg = f"{base}: {self._width(x)} columns are not the streams of {columns} weights"
            raise ModelError(msg)
        self._need(scales, (parts,), "vector")
        self._need(base, (columns,), "vector")
        self._keep_exact(weights)
        eps = self._spec.norm_eps
        sizes = (rounds, eps, floor, parts, most)
        self._ops.append(StreamWeights(x, weights, streams, scales, base, *sizes))

    def merge_streams(
        self, x: ValueId, width: int, *, weights: ValueId | None = None, scale: float = 1.0
    ) -> ValueId:
        """Return scale * (the sum of the streams of x, each `width` wide): [T, width].

        weights: a value with the factor of stream i in column i; None: all factors are 1.
        """
        streams = self._streams(x, width)
        if weights is not None:
            self._check_columns("merge_streams: weights", weights, 0, streams)
        out = self._value("merged streams", width)
        self._ops.append(MergeStreams(x, out, width, weights, scale))
        return out

    def spread_streams(
        self,
        y: ValueId,
        weights: ValueId,
        *,
        to: ValueId,
        mixed: bool = False,
        given: bool = False,
    ) -> None:
        """Add y to each stream of `to`, in place.

        mixed, given: `weights` are from stream_weights with a matrix (mixed) or without (given).
        """
        streams = self._streams(to, self._width(y))
        columns = weight_columns(streams, ALL_PARTS if mixed else 2 if given else 1)
        self._check_width("weights", weights, columns)
        self._keep_exact(weights)
        self._ops.append(SpreadStreams(to, y, weights, self._width(y), mixed, given))

    def gate_streams(self, keys: ValueId, queries: ValueId, values: ValueId) -> ValueId:
        """Return `values` in each stream, times a gate from the keys and queries of the stream."""
        width = self._width(values)
        streams = self._streams(keys, width)
        self._check_width("gate_streams: queries", queries, streams * width)
        out = self._value("gated streams", streams * width)
        self._ops.append(GateStreams(keys, queries, values, out, width))
        return out

    def _streams(self, x: ValueId, width: int) -> int:
        """Return how many streams of `width` columns x has; ModelError if they do not divide x."""
        have = self._width(x)
        if have % width or not 1 <= have // width <= MOST_STREAMS:
            msg = f"{have} columns are not 1 to {MOST_STREAMS} streams of {width}"
            raise ModelError(msg)
        return have // width
