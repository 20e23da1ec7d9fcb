"""OnDemand: a further model of the server, with engine processes of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from cpuserve.api.build import load_texts, make_context
from cpuserve.api.engines import start_engines
from cpuserve.prepare import kv_cache_bytes
from cpuserve.serving.limits import default_body_bytes

if TYPE_CHECKING:
    from cpuserve.api.options import HttpOptions
    from cpuserve.engine.ipc import Progress, Stats
    from cpuserve.engine.replicas import ReplicaClient
    from cpuserve.prepare import Prepared
    from cpuserve.serving.context import ModelContext


class OnDemand:
    """Loads one model; see serving/registry.py."""

    def __init__(
        self, name: str, prepare: Callable[[int], Prepared], http: HttpOptions, cpus: set[int]
    ) -> None:
        """`cpus`: those that the engines may use; the front end may be pinned to others."""
        self.name = name
        self._prepare = prepare
        self._http = http
        self._cpus = cpus
        # Its context length is not known before it is loaded; few have one of more than 1M tokens.
        self.most_body_bytes = http.max_body_bytes or default_body_bytes(1 << 20)

    async def load(self, promised_bytes: int) -> ModelContext:
        """Prepare the model, start its engines and load its tokenizer; see Loader."""
        prepared, client = await asyncio.to_thread(self._start, promised_bytes)
        try:
            config = prepared.resolved.config
            loaded, _ = await asyncio.gather(
                asyncio.to_thread(load_texts, config), client.wait_ready()
            )
            configs, platform = prepared.resolved.replicas, prepared.platform
            kv_bytes = kv_cache_bytes(prepared)
            context, _ = make_context(client, configs, self._http, platform, kv_bytes)
            context.set_ready(*loaded)
        except BaseException:
            await client.close()
            raise

        def on_step(stats: Stats) -> None:
            context.metrics.on_step(stats)

        client.on_step = on_step
        return context

    def _start(self, promised_bytes: int) -> tuple[Prepared, ReplicaClient]:
        # The settings and the engines get the CPUs of this thread, which others will use again.
        own = os.sched_getaffinity(0) if self._cpus else set()
        if self._cpus:
            os.sched_setaffinity(0, self._cpus)
        try:
            prepared = self._prepare(promised_bytes)
            restart = self._http.engine_restart
            return prepared, start_engines(prepared.resolved, _quietly, restart=restart)
        finally:
            if own:
                os.sched_setaffinity(0, own)


def _quietly(_progress: Progress) -> None:
    """Show no progress: the terminal and /health show that of the first model."""
