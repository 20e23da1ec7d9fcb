"""EngineSleeper: ends the engines of the first model while it is idle, and starts them again."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING

from cpuserve.api.request.memory_trim import trim_soon
from cpuserve.prepare import check_fits
from cpuserve.tokenizer.rendering.client import RENDERER

if TYPE_CHECKING:
    from cpuserve.engine.replicas import ReplicaClient
    from cpuserve.prepare import Prepared


class EngineSleeper:
    """Implements Sleeper of serving/registry.py."""

    def __init__(self, client: ReplicaClient, prepared: Prepared) -> None:
        self._client = client
        self._prepared = prepared

    async def sleep(self) -> None:
        """End the engines, which frees their memory."""
        await self._client.sleep()

    async def rest(self) -> None:
        """End the template processes, and return free memory to the system."""
        await asyncio.to_thread(RENDERER.close)
        gc.collect()
        trim_soon()

    async def wake(self, promised_bytes: int) -> None:
        """Start the engines and return when they serve.

        Raises:
          TooLittleMemory: the model does not fit into memory now.
          StartupError: an engine cannot start.
        """
        await asyncio.to_thread(check_fits, self._prepared, promised_bytes)
        await self._client.wake()
