"""Timers of models: each runs a coroutine after a time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Hashable

from cpuserve.background import keep


class Timers:
    """A timer for each slot of a model (`_Slot` of registry.py), and one for the server (None)."""

    def __init__(self) -> None:
        self._running: dict[Hashable, asyncio.TimerHandle] = {}

    def start(self, slot: Hashable, seconds: float, run: Callable[[], Awaitable[object]]) -> None:
        """Await run() after `seconds` and stop the earlier timer of `slot`; infinite = never."""
        self.cancel(slot)
        if seconds < math.inf:
            loop = asyncio.get_running_loop()
            self._running[slot] = loop.call_later(seconds, self._begin, slot, run)

    def cancel(self, slot: Hashable) -> None:
        """Stop a timer."""
        if (timer := self._running.pop(slot, None)) is not None:
            timer.cancel()

    def close(self) -> None:
        """Stop all timers."""
        for slot in [*self._running]:
            self.cancel(slot)

    def _begin(self, slot: Hashable, run: Callable[[], Awaitable[object]]) -> None:
        self._running.pop(slot, None)
        keep("unloading idle models", run)
