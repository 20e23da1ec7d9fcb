"""A Program: the ops of one model, the values between them, and the weights they read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cpuserve.program.ops import Op, Rope, ValueId


@dataclass(frozen=True, slots=True)
class Value:
    """A matrix [T * copies, width] that an op writes, with `copies` rows for each token."""

    id: ValueId
    name: str
    width: int
    copies: int = 1


@dataclass(frozen=True, slots=True)
class WeightNeed:
    """One checkpoint tensor that the program reads.

    role: a "matrix" is packed for Linear, Embed and Logits; a "vector" (norm weight, bias) and a
    "table" (learned positions) stay fp32.
    """

    name: str
    shape: tuple[int, ...]
    role: str


@dataclass(frozen=True, slots=True)
class CacheLayer:
    """The KV cache of one layer: for every token, `heads` keys and values of these widths.

    window: later tokens read only the last `window` tokens (0 = all).
    latent: keys and values are the same rows, and are stored once.
    """

    heads: int
    key_width: int
    value_width: int
    window: int = 0
    latent: bool = False


@dataclass(frozen=True, slots=True)
class StateLayer:
    """The state of a sequence in a recurrent layer, in fp32, for each of `units` independent parts.

    closed: number of floats of a unit's state after the last multiple of STATE_CHUNK tokens.
    open: number of floats that a unit keeps for the tokens since then, at most STATE_CHUNK tokens.
    """

    units: int
    closed: int
    open: int

    @property
    def bytes(self) -> int:
        """Bytes of a sequence's state in this layer."""
        return 4 * self.units * (whole_lines(self.closed) + whole_lines(self.open))


def whole_lines(floats: int) -> int:
    """Return `floats` rounded up to whole cache lines of 64 bytes, where the next part begins."""
    return (floats + 15) // 16 * 16


@dataclass(frozen=True, slots=True)
class Program:
    """The ops of a model and the list of weights to load; immutable, made by Builder.finish().

    unread: tensors that checkpoints may have in addition, which no op reads.
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
        """The rotary embeddings of all layers."""
        found = (getattr(op, "rope", None) for op in self.ops)
        return {rope for rope in found if rope is not None}


def group_of(program: Program, groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the cache group of each layer.

    groups: the layers of each group; () = one group has all layers.
    """
    layers = range(len(program.cache))
    found = {layer: number for number, group in enumerate(groups or (layers,)) for layer in group}
    return tuple(found[layer] for layer in layers)
