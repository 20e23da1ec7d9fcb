"""Quantized matrices as numpy codes and scales."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

GROUP = 128  # inputs that share a 4-bit scale
ZERO = 128  # code of an int8 zero

Float32 = npt.NDArray[np.float32]


class Codes(NamedTuple):
    """A matrix [n, k]: w = scale * codes + minimum per 128 of k, or scale * (codes - 128) per row.

    codes [n, k] uint8; scale [n, groups] or [n, 1] fp32; minimum [n, groups] or None for int8.
    """

    codes: npt.NDArray[np.uint8]
    scale: Float32
    minimum: Float32 | None

    def values(self) -> Float32:
        """The matrix in fp32."""
        codes = self.codes.astype(np.float32)
        if self.minimum is None:
            return (codes - np.float32(ZERO)) * self.scale
        k = codes.shape[1]
        scale, minimum = (np.repeat(x, GROUP, axis=1)[:, :k] for x in (self.scale, self.minimum))
        return codes * scale + minimum
