"""Norms of rows, and of parts of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpuserve.base.errors import ModelError
from cpuserve.program.base_builder import BaseBuilder
from cpuserve.program.ops import Joined, Op, ValueId

if TYPE_CHECKING:
    from torch import Tensor

    from cpuserve.program.interpret import Interpreter
    from cpuserve.program.lower import Lowering


class RmsNorm(Op, frozen=True):
    """out = x / sqrt(mean(x^2) + eps) * w, with w = weight, or weight + 1 if `plus_one` (Gemma).

    scale: a factor of w.
    groups: each of `groups` equal parts of a row has a mean of its own.
    """

    x: ValueId
    out: ValueId
    weight: str | None
    width: int
    eps: float
    plus_one: bool = False
    scale: float = 1.0
    groups: int = 1

    def lower(self, to: Lowering) -> None:
        to.add(self, weight=_factors(to, self.weight, self.width, self.plus_one, self.scale))

    def can_write(self, rows: str, to: Lowering) -> bool:
        """Return whether the kernel can write `rows`: any format for whole rows, f32 for parts."""
        return self.groups == 1 or rows == "f32"

    def reference(self, at: Interpreter, x: Tensor) -> Tensor:
        import torch

        from cpuserve.program.reference.rows import rms_norm

        weight = torch.ones(self.width) if self.weight is None else at.vector(self.weight)
        weight = (weight + 1 if self.plus_one else weight) * self.scale
        parts = x.reshape(len(x), self.groups, -1)
        return rms_norm(parts, weight.reshape(self.groups, -1), self.eps).reshape(x.shape)


class PartNorm(Op, frozen=True):
    """Apply RmsNorm to each of `parts` parts of x, in place; other columns do not change.

    A part has `width` columns and a mean of its own; the first part begins at `column`.
    All parts use the same weight [width].
    In OLMo, all q heads are one part, and all k heads another part.
    Without a weight, the factor is 1.
    plus_one: the factors are the weight plus 1.
    """

    write_of = "x"

    x: ValueId
    weight: str | None
    width: int
    eps: float
    column: int = 0
    parts: int = 1
    plus_one: bool = False

    def lower(self, to: Lowering) -> None:
        to.add(self, weight=_factors(to, self.weight, self.width, self.plus_one))

    def reference(self, at: Interpreter, x: Tensor) -> Tensor:
        import torch

        from cpuserve.program.reference.rows import rms_norm

        where = slice(self.column, self.column + self.parts * self.width)
        parts = x[:, where].reshape(len(x), self.parts, self.width)
        out = x.clone()
        weight = torch.ones(self.width) if self.weight is None else at.vector(self.weight)
        weight = weight + 1 if self.plus_one else weight
        out[:, where] = rms_norm(parts, weight, self.eps).reshape(len(x), -1)
        return out


class PartLayerNorm(Op, frozen=True):
    """Apply a layer norm to each of `parts` parts of x, in place; other columns do not change.

    A part has `width` columns, and a mean and variance of its own; the first begins at `column`.
    weight, bias: one tensor [parts, width], or tensors [width] of the parts, in order.
    In Persimmon, Command R+ and StableLM 2 12B, each head of q and k is a part.
    """

    write_of = "x"

    x: ValueId
    weight: tuple[str, ...]
    bias: tuple[str, ...] | None
    width: int
    eps: float
    column: int = 0
    parts: int = 1

    def lower(self, to: Lowering) -> None:
        weight, bias = (
            to.norm_weight(name, self.parts * self.width, False)
            for name in (self.weight, self.bias)
        )
        to.add(self, weight=weight, bias=bias)

    def reference(self, at: Interpreter, x: Tensor) -> Tensor:
        from torch.nn import functional as F

        where = slice(self.column, self.column + self.parts * self.width)
        parts = x[:, where].reshape(len(x), self.parts, self.width)
        normed = F.layer_norm(parts, (self.width,), eps=self.eps)
        normed = normed * at.vector(self.weight).reshape(self.parts, self.width)
        if self.bias is not None:
            normed = normed + at.vector(self.bias).reshape(self.parts, self.width)
        out = x.clone()
        out[:, where] = normed.reshape(len(x), -1)
        return out


class LayerNorm(Op, frozen=True):
    """out = (x - mean) / sqrt(var + eps) * w + bias, where w is the weight, plus 1 if `plus_one`.

    If the weight is None, w is 1.
    """

    x: ValueId
    out: ValueId
    weight: str | None
    bias: str | None
    width: int
    eps: float
    plus_one: bool = False

    def lower(self, to: Lowering) -> None:
        weight = _factors(to, self.weight, self.width, self.plus_one)
        to.add(self, weight=weight, bias=to.plain(self.bias, self.width))

    def can_write(self, rows: str, to: Lowering) -> bool:
        """Return True: the kernel can write rows of any format."""
        return True

    def reference(self, at: Interpreter, x: Tensor) -> Tensor:
        from torch.nn import functional as F

        bias = None if self.bias is None else at.vector(self.bias)
        weight = None if self.weight is None else at.vector(self.weight)
        if weight is not None and self.plus_one:
            weight = weight + 1
        return F.layer_norm(x, (self.width,), weight, bias, self.eps)


class GatedNorm(Op, frozen=True):
    """out = RmsNorm(x silu(z[t, column:])) weight, with a mean for each of `groups` equal parts.

    x and out [T, width], weight [width].
    """

    reads_of = ("x", "z")

    x: ValueId
    z: ValueId
    out: ValueId
    weight: str
    width: int
    groups: int
    column: int
    eps: float

    def lower(self, to: Lowering) -> None:
        to.add(self, weight=to.plain(self.weight, self.width))

    def reference(self, at: Interpreter, x: Tensor, z: Tensor) -> Tensor:
        import torch
        from torch.nn import functional as F

        from cpuserve.program.reference.rows import rms_norm

        gated = x * F.silu(z[:, self.column : self.column + self.width])
        normed = rms_norm(gated.reshape(len(x), self.groups, -1), torch.ones(()), self.eps)
        return normed.reshape(x.shape) * at.vector(self.weight)


def _factors(
    to: Lowering, weight: str | None, width: int, plus_one: bool, scale: float = 1.0
) -> int:
    """Return the id of the native vector with the factors of a norm; without a weight, ones."""
    if weight is not None:
        return to.norm_weight(weight, width, plus_one, scale)
    import numpy as np

    return to.vector(("ones", width), width, lambda _: np.ones(width, np.float32))


class NormsBuilder(BaseBuilder):
    """Appends norms."""

    def rms_norm(
        self,
        x: ValueId,
        name: str,
        *,
        eps: float | None = None,
        plus_one: bool = False,
        bare: bool = False,
        scale: float = 1.0,
        groups: int = 1,
        weightless: bool = False,
    ) -> ValueId:
        """Return the RmsNorm of every row: [T, width of x]. eps: by default as in the spec.

        weightless: the norm has no weight, and `name` only describes its value.
        bare: the tensor of the weight is called `name`, without the suffix ".weight".
        groups: number of equal parts of a row, each with a mean of its own.
        """
        width = self._width(x)
        if width % groups:
            msg = f"{name}: {width} columns cannot form {groups} equal groups"
            raise ModelError(msg)
        full = name if bare else f"{name}.weight"
        weight = None if weightless else self._need(full, (width,), "vector")
        out = self._value(name, width, like=x)
        kind = (plus_one, scale, groups)
        self._ops.append(RmsNorm(x, out, weight, width, self._eps(eps), *kind))
        return out

    def part_norm(
        self,
        x: ValueId,
        name: str | None,
        *,
        width: int,
        column: int = 0,
        parts: int = 1,
        eps: float | None = None,
        plus_one: bool = False,
    ) -> None:
        """Apply RmsNorm to each of `parts` parts of x, in place. The first part begins at `column`.

        name: the name of the weight; None: the norm has no weight.
        plus_one: the factors are the weight plus 1.
        """
        self._check_columns(f"{name or 'norm'}: x", x, column, parts * width)
        weight = None if name is None else self._need(f"{name}.weight", (width,), "vector")
        self._ops.append(PartNorm(x, weight, width, self._eps(eps), column, parts, plus_one))

    def part_layer_norm(
        self,
        x: ValueId,
        name: Joined,
        *,
        width: int,
        column: int = 0,
        parts: int = 1,
        bias: bool = False,
    ) -> None:
        """Apply a layer norm to each of `parts` parts of x, in place; the first is at `column`.

        name: the name of a weight [parts, width], or of the weight [width] of each part, in order.
        """
        joined = isinstance(name, str)
        names = (name,) if isinstance(name, str) else name
        shape, role = ((parts, width), "table") if joined else ((width,), "vector")
        if not joined and len(names) != parts:
            msg = f"{names[0]}: there are {len(names)} weights for {parts} parts"
            raise ModelError(msg)
        self._check_columns(f"{names[0]}: x", x, column, parts * width)
        weights = tuple(self._need(f"{each}.weight", shape, role) for each in names)
        biases = tuple(self._need(f"{each}.bias", shape, role) for each in names) if bias else None
        self._ops.append(PartLayerNorm(x, weights, biases, width, self._eps(None), column, parts))

    def layer_norm(
        self,
        x: ValueId,
        name: str,
        *,
        eps: float | None = None,
        bias: bool = True,
        plus_one: bool = False,
        weightless: bool = False,
    ) -> ValueId:
        """Return the LayerNorm of every row: [T, width of x]. eps: by default as in the spec.

        plus_one: the factors are the weight plus 1.
        weightless: the norm has no weight, and `name` only describes its value.
        """
        width = self._width(x)
        weight = None if weightless else self._need(f"{name}.weight", (width,), "vector")
        shift = self._need(f"{name}.bias", (width,), "vector") if bias else None
        out = self._value(name, width, like=x)
        self._ops.append(LayerNorm(x, out, weight, shift, width, self._eps(eps), plus_one))
        return out

    def gated_norm(
        self,
        x: ValueId,
        z: ValueId,
        name: str,
        *,
        groups: int = 1,
        column: int = 0,
        eps: float | None = None,
    ) -> ValueId:
        """Return the RmsNorm of x * SiLU(z[:, column:]): [T, width of x].

        Each of `groups` equal parts of a row has a mean of its own.
        """
        width = self._width(x)
        if width % groups:
            msg = f"{name}: {width} columns cannot form {groups} equal groups"
            raise ModelError(msg)
        self._check_columns(f"{name}: z", z, column, width)
        weight = self._need(f"{name}.weight", (width,), "vector")
        out = self._value(name, width)
        self._ops.append(GatedNorm(x, z, out, weight, width, groups, column, self._eps(eps)))
        return out
