"""The interface between weight formats and the C++ packers.

A format (dense, gguf, awq, gptq ...) turns checkpoint tensors into `QuantTensor`s: rows of a source
type that the packers read (`csrc/kernels/table.h: SourceType`). Tensors stay quantized in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

WeightKind = Literal[
    "dense_bf16",
    "dense_f16",
    "dense_f32",
    "w8_g32",
    "w4_g32",
    "w4m_g32",
    "w4m_g128",
    "w8_channel",
    "w8_channel_g128",
    "q4_k",
    "q5_k",
    "q6_k",
    "q2_k",
    "q3_k",
    "q5_0",
    "q5_1",
    "iq4_nl",
    "iq4_xs",
    "mxfp4",
]
SourceType = Literal[
    "f32",
    "f16",
    "bf16",
    "gguf_q8_0",
    "gguf_q4_0",
    "gguf_q4_1",
    "s8_channel",
    "u4m_g128",
    "gguf_q4_k",
    "gguf_q5_k",
    "gguf_q6_k",
    "gguf_q2_k",
    "gguf_q3_k",
    "gguf_q5_0",
    "gguf_q5_1",
    "gguf_iq4_nl",
    "gguf_iq4_xs",
    "gguf_mxfp4",
]


@dataclass(frozen=True, slots=True)
class QuantTensor:
    """One checkpoint tensor, as stored.

    data: uint8 view [rows, row_bytes] of the file mapping (1-D tensors: rows = 1).
    shape: logical shape. row_order: packed row i is stored row row_order[i] (None = identity); it
    reverses the RoPE interleaving of q and k in GGUF files without changing their blocks.
    release: tells the file mapping that these bytes have been read (MADV_DONTNEED).
    """

    name: str
    shape: tuple[int, ...]
    source: SourceType
    data: npt.NDArray[np.uint8]
    row_order: npt.NDArray[np.int32] | None = None
    release: Callable[[], None] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of `data`."""
        return int(self.data.nbytes)

    def cut(self, rows: slice, row_bytes: int) -> npt.NDArray[np.uint8]:
        """Rows [n, row_bytes] of `data`; those of a stack of matrices are one after another."""
        data = self.data.reshape(-1, row_bytes)
        return data[rows if self.row_order is None else self.row_order[rows]]


class Weights(Protocol):
    """All tensors of a checkpoint under the names that a Program uses (Hugging Face names)."""

    def names(self) -> set[str]:
        """Every tensor name in the checkpoint, after renaming."""

    def get(self, name: str) -> QuantTensor:
        """The tensor as a view of the file mapping; its data is not read yet."""

    def kind(self, name: str, dtype: str) -> WeightKind:
        """The weight kind that this tensor is packed into when the engine computes in `dtype`."""
