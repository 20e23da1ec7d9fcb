"""A Program: the ops of one model, the values they pass, and the weights they need."""

from __future__ import annotations

from dataclasses import dataclass

from cpuserve.program.ops import Op, ValueId


@dataclass(frozen=True, slots=True)
class Value:
    """A matrix [T, width] that an op writes."""

    id: ValueId
    name: str
    width: int


@dataclass(frozen=True, slots=True)
class WeightNeed:
    """One checkpoint tensor the program reads.

    role "matrix" is packed for Linear/Embed/Logits, "vector" and "table" stay fp32 (norm weights,
    biases, learned positions).
    """

    name: str
    shape: tuple[int, ...]
    role: str


@dataclass(frozen=True, slots=True)
class KvShape:
    """KV geometry of one attention layer."""

    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Program:
    """What `Builder.finish()` returns; immutable, and the list of weights to load."""

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    weights: tuple[WeightNeed, ...]
    kv_layers: tuple[KvShape, ...]
    vocab: int
    width: int
