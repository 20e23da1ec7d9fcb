"""Finds output heads that the config calls tied to the embeddings, but that the file stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cpuserve.models import build_program, find_model, spec_from_config
from cpuserve.models.config import read_architectures
from cpuserve.program.operations.dense import Logits
from cpuserve.quant import dequantize

if TYPE_CHECKING:
    from cpuserve.models.spec import ModelSpec
    from cpuserve.quant.base import QuantTensor, Weights

OWN_HEAD = "own_head"  # a key that only configs in memory have, never config.json
ROWS_AT_ONCE = 4096  # number of rows of both matrices that are compared at a time


def with_own_head(config: dict[str, Any], weights: Weights) -> dict[str, Any]:
    """Return the config, with tie_word_embeddings false if the files store another head.

    The config of a merged fine-tune may say that the head is tied although a trained head is
    stored. As in transformers, a stored head is used if it differs from the embeddings.

    Raises:
        ModelError: the config is not of a supported model, or the tensors are broken.
    """
    if not _names_family(config):
        return config
    spec = spec_from_config(config)
    if not spec.tied or (tied := _head(spec)) is None:
        return config
    own = _head(replace(spec, tied=False))
    stored = weights.names()
    if own == tied or own not in stored or tied not in stored:
        return config
    if _equal(weights.get(own), weights.get(tied)):
        return config
    names = [key for key in ("tie_embedding",) if key in config]  # another name of it
    return {**config, **dict.fromkeys(["tie_word_embeddings", *names], False), OWN_HEAD: True}


def _names_family(config: Mapping[str, Any]) -> bool:
    """Whether cpuserve has a family for this config; all other models run through transformers."""
    from cpuserve.models import architecture_of

    return bool(read_architectures(config)) and find_model(architecture_of(config)) is not None


def _head(spec: ModelSpec) -> str | None:
    """Return the name of the matrix that computes the logits; None if the model has no logits."""
    last = build_program(spec).ops[-1]
    return last.weight if isinstance(last, Logits) else None


def _equal(head: QuantTensor, table: QuantTensor) -> bool:
    """Whether two matrices have equal values; False if only one of them is quantized."""
    if head.shape != table.shape or head.source != table.source:
        return False
    rows = head.shape[0]
    if head.row_order is not None or table.row_order is not None or rows < 1:
        return bool((dequantize(head) == dequantize(table)).all())
    size, same = head.nbytes // rows, table.nbytes // rows
    if size != same:
        return False
    for begin in range(0, rows, ROWS_AT_ONCE):
        some = slice(begin, min(begin + ROWS_AT_ONCE, rows))
        if not (head.cut(some, size) == table.cut(some, size)).all():
            return False
    return True
