"""The loaders of models: ModelLoader, and EngineSleeper for the first model."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import TYPE_CHECKING

from cpuserve.api.lifecycle.engines import start_engines
from cpuserve.api.lifecycle.model_context import (
    files_fingerprint,
    kept_responses,
    load_texts,
    make_context,
)
from cpuserve.api.lifecycle.model_details import details_of
from cpuserve.api.request.memory_trim import trim_asleep
from cpuserve.base.affinity import on_cpus
from cpuserve.loader.source_files import check_same
from cpuserve.media.decoding.client import DECODER
from cpuserve.prepare import check_fits, known_pooling, kv_cache_bytes
from cpuserve.serving.models.limits import default_body_bytes
from cpuserve.serving.models.preparation import in_background
from cpuserve.tokenizer.rendering.client import RENDERER

if TYPE_CHECKING:
    from cpuserve.config.engine import SourceFile
    from cpuserve.config.server import ServerOptions
    from cpuserve.config.several import NamedModel
    from cpuserve.engine.ipc import StageProgress, Stats
    from cpuserve.engine.launch import SpareProcess
    from cpuserve.engine.replicas import ReplicaClient
    from cpuserve.prepare import Prepared
    from cpuserve.serving.models.context import ModelContext
    from cpuserve.serving.tools.learn import LearnedFormat
    from cpuserve.tokenizer.chat import ChatTemplate
    from cpuserve.tokenizer.tokenizer import Tokenizer


class ModelLoader:
    """Loads one model when a request needs it; implements Loader of serving/models/loaders.py."""

    def __init__(
        self,
        model: NamedModel,
        prepare: Callable[[int], Prepared],
        options: ServerOptions,
        spare: SpareProcess,
    ) -> None:
        """Store the arguments until the model is loaded.

        prepare: finds the model and resolves its settings;
          its argument is the number of bytes of free memory that other models may still take.
        spare: knows the CPUs of the engines, and may have an idle process for the next engine.
        """
        self.name = model.name
        self.aliases = model.aliases
        self.adapters = model.adapters
        self._model = model
        self._pooling: list[str | None] = []  # empty until it has been read
        self._prepare = prepare
        self._options = options
        self._spare = spare
        self._sources: list[SourceFile] = []  # the model's files when it was first loaded
        # The context length is unknown until the model is loaded; few contexts exceed 1M tokens.
        self.most_body_bytes = options.max_body_size or default_body_bytes(1 << 20)

    async def pooling(self) -> str | None:
        """Return the pooling type of a model on this machine; None = unknown before loading."""
        if not self._pooling:
            options = self._model.asked.options
            self._pooling.append(await asyncio.to_thread(known_pooling, options))
        return self._pooling[0]

    async def load(self, promised_bytes: int) -> ModelContext:
        """Prepare the model, start its engines and load its tokenizer; see Loader.load."""
        with self._spare.starting():
            preparing = in_background(lambda: self._prepared(promised_bytes))
            prepared = await asyncio.wrap_future(preparing)
        client = self._start(prepared)
        config = prepared.resolved.config
        texts = asyncio.create_task(asyncio.to_thread(load_texts, config))
        try:
            loaded, _ = await asyncio.gather(texts, client.wait_ready())
            configs, platform = prepared.resolved.replicas, prepared.platform
            kv_bytes = kv_cache_bytes(prepared)
            details = details_of(prepared)
            context, _ = make_context(client, configs, self._options, platform, kv_bytes, details)
            if self._options.audit is not None:
                context.files_fingerprint = await asyncio.to_thread(files_fingerprint, config)
            context.kept = await asyncio.to_thread(kept_responses, config)
            context.set_ready(*loaded)
            self._sources = config.sources
        except BaseException:
            texts.add_done_callback(_unload)
            await client.close()
            raise

        def on_step(stats: Stats) -> None:
            context.metrics.on_step(stats)

        client.on_step = on_step
        return context

    def _prepared(self, promised_bytes: int) -> Prepared:
        check_same(self._sources)
        with on_cpus(self._spare.cpus):  # prepare() derives settings from the CPUs of its thread
            return self._prepare(promised_bytes)

    def _start(self, prepared: Prepared) -> ReplicaClient:
        """Start the engines in the thread of the event loop: Linux ends them when it ends."""
        with on_cpus(self._spare.cpus):
            restart = self._options.engine_restart
            return start_engines(prepared.resolved, _quietly, restart=restart, spare=self._spare)


def _unload(texts: asyncio.Task[tuple[Tokenizer, ChatTemplate, LearnedFormat]]) -> None:
    """End the processes of the tokenizer of a model that does not start (tokenizer/limited)."""
    if not texts.cancelled() and texts.exception() is None:
        texts.result()[0].unload()


def _quietly(_progress: StageProgress) -> None:
    """Ignore the progress: the terminal and /health show only the first model."""


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
        await asyncio.to_thread(DECODER.close)
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
