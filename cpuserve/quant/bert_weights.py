"""The weights of families like BERT, as their Programs read them.

NomicExperts: the experts of nomic-bert, which are in flat matrices (flat_experts.py).
The published model adds a bias to the sum of the experts. Here this bias becomes a part
of the norm before the experts: a Program applies the norm a second time, with this bias,
and adds the experts to the result. So no operation has to add a bias to a mixture.

TypedWeights: the weights of a BERT that reads pairs of texts, with tokens of type 0 or 1.
A step knows the id and the position of a token, but not its type.
The table of word embeddings is therefore stored twice: row i is for token i with type 0,
and row vocab + i for token i with type 1. A Program adds the embedding of type 0 to every token,
so rows of the second copy include the difference between the embeddings of types 1 and 0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from cpuserve.quant import dequantize
from cpuserve.quant.base import BuiltTensor, QuantTensor
from cpuserve.quant.flat_experts import FlatExperts
from cpuserve.quant.parts import part_of
from cpuserve.quant.stored import DENSE_KINDS

if TYPE_CHECKING:
    import numpy.typing as npt

    from cpuserve.program.weight_kinds import WeightKind
    from cpuserve.quant.base import Weights

    Float32 = npt.NDArray[np.float32]

_BIAS = ".mlp.experts.bias"
_PARTS = {"w1": "up_proj", "w2": "down_proj"}


class NomicExperts(FlatExperts):
    """The `Weights` of a nomic-bert checkpoint, as its Program reads them."""

    def __init__(self, weights: Weights, experts: int, shifted: str) -> None:
        """Wrap the weights of a checkpoint.

        experts: the number of experts in a layer.
        shifted: the name of the norm with the bias.
        """
        super().__init__(weights, experts, _PARTS)
        self._shifted = shifted
        for name in [name for name in self._names if name.endswith(_BIAS)]:
            at = name.removesuffix(_BIAS)
            self._names.remove(name)
            self._names |= {f"{at}.{shifted}.weight", f"{at}.{shifted}.bias"}

    def get(self, name: str) -> QuantTensor:
        """Return the tensor; matrices of experts are views of the file, or are built when read."""
        return self._norm(name) if f".{self._shifted}." in name else super().get(name)

    def _norm(self, name: str) -> QuantTensor:
        """Return the weight of the norm, or its bias plus the bias of the experts."""
        at, _, kind = name.partition(f".{self._shifted}.")
        norm = self._weights.get(f"{at}.norm1.{kind}")
        if kind == "weight":
            return replace(norm, name=name)
        values = dequantize(norm) + dequantize(self._weights.get(f"{at}{_BIAS}"))
        return QuantTensor(name, norm.shape, "f32", values.reshape(1, -1).view("u1"))


class TypedWeights:
    """`Weights` where matrix `words` [vocab, width] has 2 * vocab rows, for two token types."""

    def __init__(self, weights: Weights, words: str, types: str) -> None:
        """types: the name of the tensor with the embeddings of token types [at least 2, width]."""
        self._weights = weights
        self._words = words
        self._types = types

    def names(self) -> set[str]:
        """Return the name of each tensor in the checkpoint, after renaming."""
        return self._weights.names()

    def get(self, name: str) -> QuantTensor:
        """Return the tensor; the rows of `words` are built in fp32 when they are read."""
        whole = self._weights.get(name)
        if name != self._words:
            return whole
        vocab, width = whole.shape

        def build(some: slice) -> npt.NDArray[np.uint8]:
            first, end, step = some.indices(2 * vocab)
            parts = []
            for start, more in ((0, np.zeros(width, np.float32)), (vocab, self._beyond())):
                at = slice(max(first - start, 0), min(end - start, vocab), 1)
                if at.start < at.stop:
                    part = part_of(name, whole, at, vector=False)
                    parts.append(dequantize(part) + more)
            return np.ascontiguousarray(np.concatenate(parts)[::step]).view(np.uint8)

        size = 2 * vocab * width * 4
        return BuiltTensor(name, (2 * vocab, width), "f32", size, build, whole.release)

    def _beyond(self) -> Float32:
        """Return the embedding of type 1 minus the embedding of type 0, [width]."""
        types = dequantize(self._weights.get(self._types))
        difference: Float32 = types[1] - types[0]
        return difference

    def kind(self, name: str, dtype: str) -> WeightKind:
        """Return the weight kind of the tensor; `words` is dense."""
        return DENSE_KINDS[dtype] if name == self._words else self._weights.kind(name, dtype)
