"""TurnSlots: how many tasks of an event loop may do long work at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cpuserve.core.places import CallerPlaces


class TurnSlots:
    """Slots for long tasks of callers; no caller can take all of them (CallerPlaces)."""

    def __init__(self, count: int) -> None:
        self._places: CallerPlaces[asyncio.Future[None]] = CallerPlaces(count)

    @asynccontextmanager
    async def slot(self, caller: str, work: float = 1.0) -> AsyncIterator[None]:
        """Wait for a slot in the turn of a caller, and hold it inside of the context.

        work: what the turn costs, in any unit that is the same for all slots.
        """
        mine = asyncio.get_running_loop().create_future()
        self._places.put(caller, mine, work)
        self._give()
        try:
            await mine
            yield
        finally:
            if not self._places.remove(mine):
                self._places.leave(caller)
                self._give()

    def _give(self) -> None:
        while (taken := self._places.take()) is not None:
            _, waiting = taken
            if not waiting.done():  # a task that was cancelled leaves its slot by itself
                waiting.set_result(None)
