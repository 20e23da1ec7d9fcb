"""EngineSleeper: ends the engines of the first model while it is idle, and restarts them."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING

from cpuserve.api.request.memory_trim import trim_asleep
from cpuserve.loader.source_files import check_same
from cpuserve.prepare import check_fits
from cpuserve.tokenizer.rendering.client import RENDERER

if TYPE_CHECKING:
    from cpuserve.engine.launch import SpareProcess
    from cpuserve.engine.replicas import ReplicaClient
    from cpuserve.prepare import Prepared
    from cpuserve.serving.models.context import ModelContext


class EngineSleeper:
    """Ends the engines of the first model when no request uses them, and restarts them later.

    This class implements Sleeper of serving/models/loaders.py.
    """

    def __init__(self, client: ReplicaClient, prepared: Prepared, spare: SpareProcess) -> None:
        self._client = client
        self._prepared = prepared
        self._spare = spare

    async def sleep(self) -> None:
        """End the engine processes, which frees their memory."""
        await self._client.sleep()

    async def rest(self, context: ModelContext) -> None:
        """End template renderers and spare processes, and return free memory to the system."""
        self._spare.close()
        await asyncio.to_thread(RENDERER.close)
        context.get_tokenizer().unload()
        gc.collect()
        await asyncio.to_thread(trim_asleep)

    async def wake(self, context: ModelContext, promised_bytes: int) -> None:
        """Restart the engines, reload the vocabulary, and return when the model can serve requests.

        Raises:
          TooLittleMemory: too little memory is free for the model now.
          SourceChanged: a file of the model is not the file of the first start.
          StartupError: an engine cannot start.
        """
        await asyncio.to_thread(check_same, self._prepared.resolved.config.sources)
        with self._spare.starting():
            await asyncio.to_thread(check_fits, self._prepared, promised_bytes)
        load = context.get_tokenizer().load_again
        reading = asyncio.create_task(asyncio.to_thread(load))
        try:
            await self._client.wake()
            await reading
        except BaseException:
            reading.cancel()
            await self._client.sleep()
            raise
