"""LineSlots: how many lines of all batches run at the same time, in turns of the batches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from cpuserve.core.turns import CallerTurns


class LineSlots:
    """At most `most` lines run; a turn of a batch costs the bytes of its line."""

    def __init__(self, most: int) -> None:
        self._free = most
        self._waiting: CallerTurns[asyncio.Future[None]] = CallerTurns()

    @asynccontextmanager
    async def hold(self, batch: str, num_bytes: int) -> AsyncGenerator[None]:
        """Wait for a slot for a line of `num_bytes`, and keep it until the `with` block ends."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.put(batch, granted, float(num_bytes))
        self._grant()
        try:
            await asyncio.wait((granted,))
            yield
        finally:
            if granted.done():
                self._free += 1
                self._grant()
            else:
                self._waiting.remove(granted)

    def _grant(self) -> None:
        while self._free and self._waiting:
            _, granted = self._waiting.take()
            granted.set_result(None)
            self._free -= 1
