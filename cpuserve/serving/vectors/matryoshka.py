"""Embeddings that are cut to their leading values (Matryoshka)."""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING

from cpuserve.base.errors import InvalidRequest

if TYPE_CHECKING:
    from cpuserve.serving.models.context import ModelContext


def check_dimensions(
    dimensions: int | None, context: ModelContext, field: str = "dimensions"
) -> None:
    """Raise InvalidRequest if the model's embeddings cannot be cut to `dimensions` values.

    field: the name of `dimensions` in the request. This function accepts models without embeddings,
    because serving.generate.prepare refuses them later.
    """
    width = context.vector_width
    if dimensions is not None and context.embeds and not 1 <= dimensions <= width:
        msg = f"{field} must be between 1 and {width}, the length of this model's vectors"
        raise InvalidRequest(msg, param=field)


def shortened(values: array[float], dimensions: int | None, *, unit: bool = True) -> array[float]:
    """Return the first `dimensions` values (None: all), rescaled to length 1 (Matryoshka).

    unit: whether the shortened vector is rescaled to length 1.
    """
    if dimensions is None or dimensions >= len(values):
        return values
    cut = values[:dimensions]
    if not unit:
        return cut
    length = math.sqrt(math.fsum(v * v for v in cut)) or 1.0
    return array("f", (v / length for v in cut))
