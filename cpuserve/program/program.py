"""A Program: the ops of one model, the values between them, and the weights they read."""

from __future__ import annotations

from dataclasses import dataclass

from cpuserve.program.ops import Op, ValueId


@dataclass(frozen=True, slots=True)
class Value:
    """A matrix [T * copies, width] that an op writes; copies: rows for each token of the step."""

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
class KvShape:
    """Dimensions of the KV cache of one attention layer."""

    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Program:
    """The ops of a model and the list of weights to load; immutable, made by Builder.finish()."""

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    weights: tuple[WeightNeed, ...]
    kv_layers: tuple[KvShape, ...]
    vocab: int
    width: int
