"""Models with indexers, for requests that are so short that the indexers keep all keys."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder

_WHY = "cpuserve has no indexer, which longer requests need to choose their keys"


def without_indexer(spec: ModelSpec, most: int, *, block: int = 1) -> ModelSpec:
    """Return the spec with only as many positions as the indexers keep.

    most: the number of keys that an indexer lets a query read, in whole blocks of `block` keys.
      The query also reads the keys after the last whole block.
    """
    kept = most + block - 1
    if kept >= spec.max_position:
        return spec
    return replace(spec, max_position=kept, extra={**spec.extra, "length_limit": _WHY})


def leave_indexer(b: Builder, at: str, names: Iterable[str]) -> None:
    """Allow checkpoints to have the indexer of the attention `at`, which no op reads.

    names: the tensors of the indexer; FP8 checkpoints have scales of its matrices as well.
    """
    for name in names:
        b.leave(f"{at}.indexer.{n}" for n in (name, name.replace(".weight", ".weight_scale_inv")))
