"""MXFP4 checkpoints (gpt-oss): 4-bit floats in blocks of 32; the scale is a power of two.

The matrices [out, in] of all experts are one tensor X_blocks [experts, out, in / 32, 16],
where byte i has element 2 i in its low half and element 2 i + 1 in its high half.
X_scales [experts, out, in / 32] has the exponents plus 127. The GGUF type MXFP4 has the same codes
in another order. Matrices that the quantizer left alone
(`modules_to_not_convert`) have no blocks. Source: OCP Microscaling Formats 1.0;
transformers integrations/mxfp4.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cpuserve.base.errors import ModelError
from cpuserve.quant.base import BuiltTensor
from cpuserve.quant.dense import SOURCES
from cpuserve.quant.registry import weight_format
from cpuserve.quant.rows import mxfp4_rows
from cpuserve.quant.stored import QUANTIZED_KINDS, StoredWeights, WithoutTensors

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from cpuserve.program.weight_kinds import SourceType, WeightKind
    from cpuserve.quant.base import QuantTensor, Weights
    from cpuserve.quant.stored import StoredTensor, TensorStore

    Bytes = npt.NDArray[np.uint8]

BLOCK = 32  # number of elements in a block, which share a scale
PACKED = BLOCK // 2  # number of bytes for the codes of a block
SOURCE: SourceType = "gguf_mxfp4"
BLOCKS, SCALES = "_blocks", "_scales"


@weight_format("mxfp4")
def mxfp4_weights(store: TensorStore, config: dict[str, Any]) -> Weights:  # noqa: ARG001
    """Return the weights of an MXFP4 checkpoint; ModelError if its blocks and scales do not fit."""
    return Mxfp4Weights(store)


class Mxfp4Weights:
    """Weights of a checkpoint with some tensors stored as blocks and scales."""

    def __init__(self, store: TensorStore) -> None:
        """Find the matrices in `store` that are stored as blocks."""
        self._store = store
        names = store.names()
        self._packed = {n.removesuffix(BLOCKS) for n in names if n.endswith(BLOCKS)}
        for name in self._packed:
            _check(store, name)
        taken = {name + part for name in self._packed for part in (BLOCKS, SCALES)}
        self._dense = StoredWeights(WithoutTensors(store, taken), SOURCES)

    def names(self) -> set[str]:
        """Return all tensor names; a matrix with blocks and scales counts as one tensor."""
        return self._dense.names() | self._packed

    def get(self, name: str) -> QuantTensor:
        """Return the tensor; blocks are put in the order of GGUF when they are read."""
        if name not in self._packed:
            return self._dense.get(name)
        return block_stack(name, self._store.get(name + BLOCKS), self._store.get(name + SCALES))

    def kind(self, name: str, dtype: str) -> WeightKind:
        """Return the weight kind: MXFP4 for tensors in blocks, otherwise the kind of `dtype`."""
        return QUANTIZED_KINDS[SOURCE] if name in self._packed else self._dense.kind(name, dtype)


def block_stack(name: str, blocks: StoredTensor, scales: StoredTensor) -> BuiltTensor:
    """Return blocks [..., in / 32, 16] with scales [..., in / 32] as rows of GGUF blocks."""
    *outer, groups = scales.shape

    def build(rows: slice) -> Bytes:
        pairs = blocks.data.reshape(-1, groups * PACKED)[rows]
        return mxfp4_rows(pairs, scales.data.reshape(-1, groups)[rows])

    def release() -> None:
        for part in (blocks, scales):
            if part.release:
                part.release()

    size = int(blocks.data.nbytes + scales.data.nbytes)
    return BuiltTensor(name, (*outer, groups * BLOCK), SOURCE, size, build, release)


def _check(store: TensorStore, name: str) -> None:
    if name + SCALES not in store.names():
        msg = f"the checkpoint has {name}{BLOCKS}, but no {name}{SCALES}; download it again"
        raise ModelError(msg)
    blocks, scales = store.get(name + BLOCKS), store.get(name + SCALES)
    fits = len(scales.shape) > 1 and blocks.shape == (*scales.shape, PACKED)
    if not fits or {blocks.dtype, scales.dtype} != {"U8"}:
        msg = (
            f"{name}{BLOCKS} is {blocks.dtype} {list(blocks.shape)} and {name}{SCALES} is "
            f"{scales.dtype} {list(scales.shape)}; blocks must be U8 of {PACKED} bytes for each "
            "scale, and scales U8"
        )
        raise ModelError(msg)
