"""A quantized matrix as numpy arrays of its codes and scales."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

GROUP = 128  # number of inputs that share a scale in 4-bit matrices
ZERO = 128  # the uint8 code of the int8 value 0

Float32 = npt.NDArray[np.float32]


class Codes(NamedTuple):
    """A matrix [n, k]: w = scale * codes + minimum; without a minimum w = scale * (codes - zero).

    codes: uint8 [n, k]. scale, minimum (or None): fp32 [n, groups], each for `group` inputs.
    """

    codes: npt.NDArray[np.uint8]
    scale: Float32
    minimum: Float32 | None
    group: int
    zero: int = ZERO

    def values(self) -> Float32:
        """The matrix in fp32."""
        codes = self.codes.astype(np.float32)
        if self.minimum is None:
            return (codes - np.float32(self.zero)) * self._spread(self.scale)
        return codes * self._spread(self.scale) + self._spread(self.minimum)

    def _spread(self, per_group: Float32) -> Float32:
        return np.repeat(per_group, self.group, axis=1)[:, : self.codes.shape[1]]
