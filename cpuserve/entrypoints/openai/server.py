"""The front end's event loop: HTTP server, loading, signals, and the ways it ends."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import uvicorn

from cpuserve.entrypoints.openai.app import create_app
from cpuserve.entrypoints.openai.cpu import CpuView
from cpuserve.entrypoints.openai.generation import MAX_SEQUENCES_PER_REQUEST
from cpuserve.entrypoints.openai.http import MAX_HEADER_BYTES, guarded_protocol
from cpuserve.entrypoints.openai.serving import HttpLimits, Serving
from cpuserve.errors import CpuserveError, EngineDead
from cpuserve.log import get_logger
from cpuserve.metrics import ServerMetrics
from cpuserve.tokenizer.load import load_tokenizer

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Sequence

    from starlette.types import ASGIApp

    from cpuserve.config.engine import EngineConfig
    from cpuserve.engine.client import EngineClient
    from cpuserve.engine.ipc import Stats
    from cpuserve.entrypoints.serve import HttpOptions, ReadyFn
    from cpuserve.platforms import Platform

log = get_logger("serve")

EXIT_OK = 0
EXIT_ENGINE_DEAD = 1

# After requests have been told that they end: what their connections get to flush it.
_FLUSH_S = 1.0
# How long a dead engine's clients get to read why, before a supervisor may start anew.
_DEAD_GRACE_S = 1.0
_POLL_S = 0.1
_KEEP_ALIVE_S = 30
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class FrontEnd:
    """One HTTP server over one engine, or several as one."""

    def __init__(
        self,
        client: EngineClient,
        configs: Sequence[EngineConfig],
        http: HttpOptions,
        url: str,
        platform: Platform,
    ) -> None:
        """`configs`: of the engines behind `client`; what the API shows is the same in all."""
        config = configs[0]
        self._client = client
        self._config = config
        self._http = http
        self._url = url
        cpu = CpuView(platform, configs)
        metrics = ServerMetrics(
            model_name=config.served_model_names[0],
            max_model_len=config.max_model_len,
            stats=lambda: client.stats,
            cache=_cache_facts(config),
            cpu=lambda: cpu.sample(client.stats, client.info),
            replicas=(lambda: client.replicas) if len(configs) > 1 else None,
            tiers=_tiers(config),
        )
        self.serving = Serving(
            client,
            metrics,
            tuple(config.served_model_names),
            config.max_model_len,
            HttpLimits(
                max_sequences=_most_sequences(configs, http),
                silent_s=http.silent_s,
                slots=sum(config.max_num_seqs for config in configs),
                max_queued_requests=http.max_queued_requests * len(configs),
                max_queued_tokens=http.max_queued_tokens * len(configs),
                longest_s=http.longest_s,
            ),
            default_sampling=config.default_sampling,
            build=_build(config),
            cpu=cpu,
        )
        self._stop = asyncio.Event()
        self._app = create_app(self.serving, api_keys=http.api_keys)
        self._server = _server_of(self._app, http)

    def on_step(self, stats: Stats) -> None:
        """The engine ran a step."""
        self.serving.metrics.on_step(stats)
        if self.serving.cpu is not None:
            self.serving.cpu.meter.on_step(stats)

    def on_progress(self, stage: str, done: int, total: int) -> None:
        """Show how far the engine is on /health."""
        share = f" {100 * done // total} %" if total else ""
        self.serving.loading = f"{stage}{share}"

    async def run(self, listener: socket.socket, on_ready: ReadyFn | None = None) -> int:
        """Serve on `listener` until a signal or the engine's death; returns the exit code.

        Raises:
          StartupError: the engine or the tokenizer could not be loaded.
        """
        http = asyncio.create_task(self._server.serve(sockets=[listener]))
        try:
            self._take_signals()
            return await self._serve(http, on_ready)
        finally:
            await self._close(http)

    async def _serve(self, http: asyncio.Task[None], on_ready: ReadyFn | None) -> int:
        stopped = asyncio.create_task(self._stop.wait())
        loading = asyncio.create_task(self.load())
        watching = asyncio.create_task(self._watch())
        shown: asyncio.Task[None] | None = None
        try:
            await asyncio.wait((stopped, loading, http), return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
                if on_ready is not None:
                    shown = asyncio.create_task(_shown(on_ready, self._url, self._client))
                await asyncio.wait((stopped, watching, http), return_when=asyncio.FIRST_COMPLETED)
            if http.done():
                http.result()
            if watching.done() and not stopped.done():
                return await self._after_death()
            await self._drain()
            return EXIT_OK
        finally:
            for task in (stopped, loading, watching, shown):
                if task is not None:
                    task.cancel()

    @property
    def app(self) -> ASGIApp:
        """The application, for another HTTP server than `run`'s; it answers after `load`."""
        return self._app

    async def load(self) -> None:
        """Tokenizer and engine, at the same time; StartupError of either."""
        names = self._config.tokenizer_path, self._config.chat_template
        tokenizer = asyncio.create_task(asyncio.to_thread(load_tokenizer, *names))
        try:
            await self._client.wait_ready()
            self.serving.set_ready(*await tokenizer)
        finally:
            tokenizer.cancel()
        # What is loaded stays: collections need not look at it again.
        gc.collect()
        gc.freeze()

    async def _watch(self) -> None:
        """Return when the engine has died, or all engines have for good."""
        while not self.serving.ready or not self._client.ended:
            await asyncio.sleep(_POLL_S)

    async def _after_death(self) -> int:
        self.serving.failed = "The engine has died: the server is about to exit"
        try:
            await asyncio.wait_for(self._client.ask("check"), _DEAD_GRACE_S)
        except EngineDead as error:
            self.serving.failed = error.message
        except asyncio.TimeoutError:
            pass
        log.error("%s; its requests were ended with an error", self.serving.failed)
        await asyncio.sleep(_DEAD_GRACE_S)
        return EXIT_ENGINE_DEAD

    async def _drain(self) -> None:
        """Let running requests finish, for a while, and take no new ones."""
        self.serving.draining = True
        self._server.should_exit = True
        running = self.serving.active_sequences
        if running:
            log.info("stopping: %d sequences may finish within %g s", running, self._http.drain_s)
        loop = asyncio.get_running_loop()
        until = loop.time() + self._http.drain_s
        while self.serving.active_sequences and loop.time() < until and self._client.alive:
            await asyncio.sleep(_POLL_S / 2)

    async def _close(self, http: asyncio.Task[None]) -> None:
        """End the engine, which ends what still runs with an error, then the connections."""
        self.serving.draining = True
        self._server.should_exit = True
        await self._client.close()
        await asyncio.wait((http,), timeout=_FLUSH_S)
        if not http.done():
            self._server.force_exit = True
            http.cancel()
            await asyncio.wait((http,), timeout=_FLUSH_S)

    def _take_signals(self) -> None:
        """The first SIGINT or SIGTERM stops, the second ends the process at once.

        For good: closing takes its time too, and a second signal must still cut it short.
        """
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            # The engine process ends by itself when its socket closes.
            sys.stderr.flush()
            os._exit(128 + number)
        self._stop.set()


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, which would end the process by the signal."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(serving: Serving, http: HttpOptions) -> uvicorn.Server:
    """The HTTP server over `serving`; run it with serve(sockets=[...])."""
    return _server_of(create_app(serving, api_keys=http.api_keys), http)


def _server_of(app: ASGIApp, http: HttpOptions) -> uvicorn.Server:
    config = uvicorn.Config(
        app,
        http=guarded_protocol(http.header_timeout_s, http.write_timeout_s),
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=http.access_log,
        server_header=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_keep_alive=_KEEP_ALIVE_S,
    )
    _adopt_uvicorn_logs(http.access_log)
    return _Server(config)


def _adopt_uvicorn_logs(access_log: bool) -> None:
    """uvicorn's warnings go where ours go; its greetings nowhere."""
    for name, level in (("uvicorn.error", logging.WARNING), ("uvicorn.access", logging.INFO)):
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.propagate = False
        if name == "uvicorn.error" or access_log:
            logger.handlers = list(logging.getLogger("cpuserve").handlers)


async def _shown(on_ready: ReadyFn, url: str, client: EngineClient) -> None:
    """Run on_ready; a banner that fails must not end the server."""
    try:
        await on_ready(url, client)
    except (EngineDead, BrokenPipeError):  # its reader may have gone: `| head`
        pass
    except CpuserveError as error:  # standard output is a full disk
        log.warning("%s", error)
    except Exception:
        log.exception("showing the banner failed")


def _most_sequences(configs: Sequence[EngineConfig], http: HttpOptions) -> int:
    """What may wait for a first token, with a last request of any size, and what runs."""
    waiting = http.max_queued_requests * len(configs) + MAX_SEQUENCES_PER_REQUEST
    return waiting + sum(config.max_num_seqs for config in configs)


def _build(config: EngineConfig) -> str:
    """What, besides version and model, changes the answer to a seeded request."""
    facts = (config.architecture, config.dtype, config.activation_bits, config.isa, config.executor)
    return "|".join(map(str, (*facts, sorted(config.default_sampling.items()))))


def _tiers(config: EngineConfig) -> list[str]:
    """What lies behind the KV cache."""
    kept = {"swap": config.swap_bytes, "disk": config.prefix_cache_dir}
    return [name for name, asked in kept.items() if asked and config.enable_prefix_caching]


def _cache_facts(config: EngineConfig) -> dict[str, object]:
    return {
        "block_size": config.block_size,
        "num_gpu_blocks": config.kv_blocks,
        "cache_dtype": config.kv_dtype,
        "enable_prefix_caching": config.enable_prefix_caching,
    }
