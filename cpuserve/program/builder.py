"""Builder: model files call its methods, once at load, to build their Program."""

from __future__ import annotations

from cpuserve.base.errors import ModelError
from cpuserve.program.operations.attention import Attention
from cpuserve.program.operations.columns import ColumnsBuilder
from cpuserve.program.operations.dense import Hidden, Logits
from cpuserve.program.operations.entries import EntriesBuilder, EntryAttention, PoolEntries
from cpuserve.program.operations.indexer import PoolIndexKeys, SelectKeys
from cpuserve.program.operations.mixture import MixtureBuilder
from cpuserve.program.operations.ngrams import NgramsBuilder
from cpuserve.program.operations.norms import NormsBuilder
from cpuserve.program.operations.patches import PatchesBuilder
from cpuserve.program.operations.relative import RelativeBuilder
from cpuserve.program.operations.streams import StreamsBuilder
from cpuserve.program.operations.wkv import WkvBuilder
from cpuserve.program.program import Program


class Builder(
    MixtureBuilder,
    NormsBuilder,
    EntriesBuilder,
    WkvBuilder,
    ColumnsBuilder,
    StreamsBuilder,
    NgramsBuilder,
    PatchesBuilder,
    RelativeBuilder,
):
    """Appends ops, tracks the width of every value, and collects the weights that the ops read.

    Weights are named without their suffix: `b.linear(x, "layers.0.mlp.up_proj", ...)` reads
    "layers.0.mlp.up_proj.weight" and, with `bias`, "layers.0.mlp.up_proj.bias".
    Widths that do not match raise ModelError, because a number in the model's config is wrong.
    """

    def finish(self) -> Program:
        """Return the complete Program.

        ModelError unless its last op is its only Logits or Hidden op.
        """
        heads = [op for op in self._ops if isinstance(op, Logits | Hidden)]
        if len(heads) != 1 or self._ops[-1] is not heads[0]:
            msg = "a program must have one logits or hidden op, as its last op"
            raise ModelError(msg)
        self._check_rotations()
        attended: list[int] = []
        for op in self._ops:
            if isinstance(op, Attention | PoolIndexKeys | SelectKeys):
                attended.append(op.layer)
            elif isinstance(op, PoolEntries | EntryAttention):
                attended += op.reads_layers
        if list(dict.fromkeys(attended)) != list(range(len(self._cache))):
            msg = (
                f"{len(self._cache)} layers are stored in the KV cache, but attention reads layers "
                f"{attended}; it must read every layer, in order"
            )
            raise ModelError(msg)
        return Program(
            ops=tuple(self._ops),
            values=tuple(self._values),
            weights=tuple(self._weights.values()),
            cache=tuple(self._cache),
            vocab=self._spec.vocab,
            width=self._spec.width,
            states=tuple(self._states),
            unread=frozenset(self._unread),
        )
