"""Dense: a module of sentence-transformers that embeddings pass after they have been pooled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """What a pooled vector x becomes: activation(weight x + bias); weight [out, in], fp32.

    activation: "none" or "tanh".
    """

    weight: Float32
    bias: Float32 | None
    activation: str

    def __call__(self, x: Float64) -> Float64:
        """Return the vector [out]. einsum adds in one order, whatever the number of threads."""
        y: Float64 = np.einsum("nk,k->n", self.weight, x.astype(np.float32)).astype(np.float64)
        if self.bias is not None:
            y = y + self.bias
        return cast("Float64", np.tanh(y)) if self.activation == "tanh" else y
