"""DamageWatch: notices weights that give no finite number for any request."""

from __future__ import annotations

from collections.abc import Iterable

from cpuserve.core.request import Delta
from cpuserve.core.results import NO_CHOICE, NO_VECTOR
from cpuserve.log import get_logger

# The results of a single prompt may overflow, but not of so many requests in a row.
DAMAGED_STEPS = 16

log = get_logger("engine")


class DamageWatch:
    """Counts the steps in a row without a finite result."""

    def __init__(self) -> None:
        self._steps = 0

    def see(self, deltas: Iterable[Delta]) -> bool:
        """Note the results of a step; return whether the model's weights count as damaged.

        A step without results changes nothing. Requests with an adapter do not count,
        because the adapter may be damaged.
        """
        finite = broken = False
        for delta in deltas:
            finite |= not (delta.error or delta.processed)
            broken |= delta.error in (NO_CHOICE, NO_VECTOR) and delta.request.adapter < 0
        if finite:
            self._steps = 0
        elif broken:
            self._steps += 1
            if self._steps == DAMAGED_STEPS:
                log.error(
                    "the model's weights are damaged: %d steps in a row computed no finite number",
                    DAMAGED_STEPS,
                )
        return self._steps >= DAMAGED_STEPS
