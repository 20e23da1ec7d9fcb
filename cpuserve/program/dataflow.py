"""Data flow of a Program: the values that an op reads and writes, and their last uses."""

from __future__ import annotations

from collections.abc import Iterable

from cpuserve.program.ops import (
    Add,
    Attention,
    Columns,
    Combine,
    Embed,
    ExpertLinear,
    Gate,
    GatedDelta,
    GatedNorm,
    Hidden,
    KeepTop,
    LatentStoreKV,
    Linear,
    Logits,
    Mamba2,
    MatchRms,
    MixParts,
    Op,
    PartNorm,
    PositionEmbed,
    RopeStoreKV,
    RouteAdapters,
    Scale,
    Spread,
    ValueId,
)
from cpuserve.program.program import Program


def looked_up(program: Program) -> frozenset[str]:
    """The matrices that only embeddings read, row by row: untied tables, and tables of layers."""
    found = {op.weight for op in program.ops if isinstance(op, Embed)}
    for op in program.ops:
        if isinstance(op, Logits):
            found.discard(op.weight)
        elif isinstance(op, Linear):
            found.difference_update(op.weights)
    return frozenset(found)


def written(op: Op) -> ValueId | None:
    """The value that an op writes or changes in place; None for Logits and Hidden."""
    if isinstance(op, Logits | Hidden):
        return None
    if isinstance(op, PositionEmbed | PartNorm | Scale | MixParts | MatchRms | KeepTop):
        return op.x
    return op.qkv if isinstance(op, RopeStoreKV) else op.out


def reads(op: Op) -> tuple[ValueId, ...]:
    """The values that an op reads; for an op that adds in place, its target is the last one."""
    if isinstance(op, Embed | RouteAdapters):
        return ()
    if isinstance(op, RopeStoreKV | Attention):
        return (op.qkv,)
    if isinstance(op, LatentStoreKV):
        return (op.q, op.latent, op.kv)
    if isinstance(op, Spread | ExpertLinear):
        return (op.x, op.routing)
    if isinstance(op, Combine):
        return (op.x, op.routing, op.out) if op.add else (op.x, op.routing)
    if isinstance(op, GatedDelta):
        return (op.x, op.gates)
    if isinstance(op, Mamba2):
        return (op.x, op.steps)
    if isinstance(op, GatedNorm):
        return (op.x, op.z)
    if isinstance(op, Columns):
        return (op.x,) if op.more is None else (op.x, op.more)
    if isinstance(op, MixParts):
        return (op.gates, op.x) if op.target is None else (op.gates, op.target, op.x)
    if isinstance(op, MatchRms):
        return (op.like, op.x)
    if isinstance(op, Add | Gate) or (isinstance(op, Linear) and op.add):
        return (op.x, op.out)
    return (op.x,)


def combined_from(value: ValueId, ops: Iterable[Op]) -> ExpertLinear | None:
    """The op that writes `value`, if these are results of experts that only Combine reads.

    ops: at least those that read or write the value.
    """
    by = None
    for op in ops:
        if isinstance(op, ExpertLinear) and op.out == value:
            by = op
        elif value in reads(op) and not (isinstance(op, Combine) and op.x == value):
            return None
    return by


def uses(program: Program) -> dict[ValueId, list[Op]]:
    """The ops that read or write each value, in order."""
    found: dict[ValueId, list[Op]] = {value.id: [] for value in program.values}
    for op in program.ops:
        for value in {*reads(op), written(op)}:
            if value is not None:
                found[value].append(op)
    return found


def last_uses(program: Program) -> dict[ValueId, int]:
    """Index of the last op that reads or writes each value."""
    last: dict[ValueId, int] = {}
    for index, op in enumerate(program.ops):
        for value in (*reads(op), written(op)):
            if value is not None:
                last[value] = index
    return last
