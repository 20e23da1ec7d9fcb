"""A Program: the ops of one model, the values between the ops, and the weights that ops read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cpuserve.program.ops import Op, Rope, ValueId


@dataclass(frozen=True, slots=True)
class Value:
    """A matrix [T * copies / fold, width] that an op writes.

    It has `copies` rows for each token, or one row for every `fold` tokens.
    """

    id: ValueId
    name: str
    width: int
    copies: int = 1
    fold: int = 1


# What a matrix computes, which decides how quantization at load stores it (quant/online.py):
# "down" projections of a feed-forward, the "values" of attention, its "output", the "embedding" of
# tokens or of "layers" (a row has the embeddings of a token for all layers), and the output "head".
# A matrix with the use "exact" is not quantized, because its errors change more than its result:
# it chooses experts or keys, or makes the decays of states.
Use = Literal["linear", "down", "values", "output", "embedding", "layers", "head", "exact"]


@dataclass(frozen=True, slots=True)
class WeightNeed:
    """One checkpoint tensor that the program reads.

    role: a "matrix" is packed for Linear, Embed and Logits.
      A "vector" (norm weight, bias) and a "table" (learned positions) are fp32.
      "ids" are whole numbers, which are used as fp32.
    use: what a matrix computes.
    """

    name: str
    shape: tuple[int, ...]
    role: str
    use: Use = "linear"


@dataclass(frozen=True, slots=True)
class CacheLayer:
    """The KV cache of one layer.

    It has `heads` keys of `key_width` and values of `value_width` columns for every token.


    window: later tokens read only the last `window` tokens (0 = all).
    latent: keys and values are the same rows, which are stored once.
    joined: the layer must be in the cache group of the layer before it, with the same window.
    """

    heads: int
    key_width: int
    value_width: int
    window: int = 0
    latent: bool = False
    joined: bool = False


@dataclass(frozen=True, slots=True)
class StateLayer:
    """The fp32 state of a sequence in a recurrent layer.

    units: number of independent parts of the state, such as one for each head.
    closed: floats of a unit for its state after the last multiple of STATE_CHUNK tokens.
    open: floats of a unit for the tokens after that multiple, at most STATE_CHUNK tokens.
    """

    units: int
    closed: int
    open: int

    @property
    def bytes(self) -> int:
        """Return the bytes of the state of one sequence in this layer."""
        return 4 * self.units * (whole_lines(self.closed) + whole_lines(self.open))


def whole_lines(floats: int) -> int:
    """Return a number of floats rounded up to whole cache lines (64 bytes)."""
    return (floats + 15) // 16 * 16


@dataclass(frozen=True, slots=True)
class Program:
    """The ops of a model and the list of weights to load; immutable, made by Builder.finish().

    unread: tensors that checkpoints may have although no op reads them.
    """

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    weights: tuple[WeightNeed, ...]
    cache: tuple[CacheLayer, ...]
    vocab: int
    width: int
    states: tuple[StateLayer, ...] = ()
    unread: frozenset[str] = frozenset()

    @property
    def ropes(self) -> set[Rope]:
        """Return the rotary embeddings of all layers."""
        found = (getattr(op, "rope", None) for op in self.ops)
        return {rope for rope in found if rope is not None}

    @property
    def ids(self) -> int:
        """Return the number of token ids: rows of the largest embedding, or logits if more."""
        return max(self.vocab, *(getattr(op, "vocab", 0) for op in self.ops))

    @property
    def num_axes(self) -> int:
        """Return on how many axes tokens have places in steps with angles."""
        return max((op.num_axes for op in self.ops), default=0)

    @property
    def partitions(self) -> list[tuple[int, bool]]:
        """Return (index of an op, whether the sequences are windows of pictures from it on).

        The first entry is for op 0. A program without windows has no other.
        """
        found = [(0, False)]
        for index, op in enumerate(self.ops):
            windowed = getattr(op, "windowed", found[-1][1])
            if windowed != found[-1][1]:
                found.append((index, windowed))
        return found

    @property
    def media_width(self) -> int:
        """Return how many columns of a row of the media buffer the ops read; 0 = none does."""
        return max((op.media_width for op in self.ops), default=0)

    @property
    def barriers(self) -> int:
        """Return the number of barriers in a step of one token.

        A barrier follows each op that is divided into tasks for several threads (`Op.claimed`).
        The last thread to arrive at a barrier runs all ops up to the next op with such tasks.
        """
        return sum(op.claimed for op in self.ops)


def group_of(program: Program, groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the cache group of each layer.

    groups: the layers of each cache group; () = one group has all layers.
    """
    layers = range(len(program.cache))
    found = {layer: number for number, group in enumerate(groups or (layers,)) for layer in group}
    return tuple(found[layer] for layer in layers)
