"""The front end process: HTTP server, loading, signals and shutdown."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cpuserve.api.app import app_of, create_app
from cpuserve.api.batches.start import batch_service
from cpuserve.api.callers.known_callers import KeyFileWatch, KnownCallers
from cpuserve.api.http.listener import Listener
from cpuserve.api.http.server import make_server
from cpuserve.api.lifecycle.created import Creation, stored_models
from cpuserve.api.lifecycle.model_context import (
    files_fingerprint,
    kept_responses,
    load_texts,
    make_context,
)
from cpuserve.api.lifecycle.service_manager import ServiceManager
from cpuserve.api.lifecycle.signals import hangups_call, stop_signals
from cpuserve.api.request.sealed import Seal
from cpuserve.api.request.state import ServerState
from cpuserve.api.stored.store import Store, StoreBounds
from cpuserve.base.background import keep
from cpuserve.base.errors import CpuserveError, EngineDead
from cpuserve.base.log import get_logger
from cpuserve.config.env import cache_dir
from cpuserve.core.kv.cache_folder import claim
from cpuserve.media.decoding.client import DECODER
from cpuserve.serving.generation.next_turn import compute_next_turns
from cpuserve.serving.models.load_progress import LoadProgress
from cpuserve.serving.models.next_turns import NextTurns
from cpuserve.serving.models.registry import Idleness, ModelRegistry
from cpuserve.tokenizer.rendering.client import RENDERER

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Sequence

    from starlette.types import ASGIApp

    from cpuserve.config.engine import EngineConfig
    from cpuserve.config.server import ServerOptions
    from cpuserve.engine.client import EngineClient
    from cpuserve.engine.ipc import Stats
    from cpuserve.platforms import Platform
    from cpuserve.serving.models.details import ModelDetails
    from cpuserve.serving.models.loaders import Loader, Sleeper
    from cpuserve.serving.tools.learn import LearnedFormat
    from cpuserve.tokenizer.chat import ChatTemplate
    from cpuserve.tokenizer.tokenizer import Tokenizer

    ShowFn = Callable[[str, EngineClient], Awaitable[None]]

log = get_logger("serve")

# While another thread runs Python, the event loop waits this many seconds for the lock of the
# interpreter (GIL) whenever it has waited for sockets. With the default of 5 ms, a short request
# waits twice as long for large ones; the other thread loses 4 % of its speed.
_SWITCH_S = 0.001
EXIT_OK = 0
EXIT_ENGINE_DEAD = 1

# How many seconds connections may take at a shutdown to send the errors that end their requests.
_FLUSH_S = 1.0
# How many seconds the end of the engines and of all connections may take after the drain.
_CLOSE_S = 10.0
# How many seconds clients can read why the engine died, before a supervisor restarts the server.
_DEAD_GRACE_S = 1.0
_POLL_S = 0.1
# How many seconds a request waits until a model that is in use can be unloaded for its own model.
_ROOM_S = 60.0


class FrontEnd:
    """An HTTP server in front of one engine or several replicas of it."""

    def __init__(
        self,
        client: EngineClient,
        configs: Sequence[EngineConfig],
        options: ServerOptions,
        url: str,
        platform: Platform,
        *,
        kv_bytes: int = 0,
        details: ModelDetails | None = None,
        loaders: Sequence[Loader] = (),
        sleeper: Sleeper | None = None,
        creation: Creation | None = None,
    ) -> None:
        """`configs`: one per engine of `client`; they agree in all settings that the API shows.

        kv_bytes: the size of the KV caches of all engines of `client` in bytes.
        details: facts about the model's files.
        loaders: one for each further model, which is loaded when a request needs it.
        sleeper: ends and restarts the engines of `client`; None = they are never ended when idle.
        creation: how models that clients create get engines; None = clients create no models.
        """
        config = configs[0]
        self._client = client
        self._config = config
        self._options = options
        self._url = url
        self.context, cpu = make_context(client, configs, options, platform, kv_bytes, details)
        self.models = ModelRegistry(
            self.context, loaders, sleeper=sleeper, idleness=_idleness(options)
        )
        stored = Store(StoreBounds.of(options))
        seal = _seal(config)
        callers = KnownCallers.of(options)
        self._key_file = None if callers.file is None else KeyFileWatch(callers)
        self.state = ServerState(
            self.models, cpu, config, stored=stored, callers=callers, seal=seal
        )
        if options.files_dir is not None:
            self.state.batches = batch_service(self.state, options)
        if options.models_dir is not None and creation is not None:
            self.state.created = stored_models(self.models, options, creation, callers)
        self.manager = ServiceManager({})
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._first_signal = self._last_signal = 0
        self._app = app_of(self.state, options)
        self._server = make_server(self._app, options)

    def on_step(self, stats: Stats) -> None:
        """Update the metrics after an engine step."""
        self.context.metrics.on_step(stats)
        if self.state.cpu is not None:
            self.state.cpu.meter.on_step(stats)

    def on_progress(self, stage: str, done: int, total: int) -> None:
        """Update the loading progress that /health shows."""
        self.context.loading = LoadProgress.of(stage, done, total)

    async def run(self, listener: socket.socket, on_ready: ShowFn | None = None) -> int:
        """Serve on `listener` until a signal arrives or the engine dies; return the exit code.

        Raises:
          StartupError: the engine or the tokenizer could not be loaded.
        """
        switch_s = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        http = asyncio.create_task(self._server.serve(sockets=[listener]))
        self.state.certificate = listener.certificate if isinstance(listener, Listener) else None
        try:
            self._take_signals()
            with hangups_call(self._read_again):
                return await self._serve(http, on_ready)
        finally:
            await self._close(http)
            sys.setswitchinterval(switch_s)

    async def _serve(self, http: asyncio.Task[None], on_ready: ShowFn | None) -> int:
        stopped = asyncio.create_task(self._stop.wait())
        loading = asyncio.create_task(self.load())
        watching = keep("watching the engine", self.wait_ended)
        shown: asyncio.Task[None] | None = None
        batches: asyncio.Task[None] | None = None
        living = keep("the watchdog", lambda: self.manager.watch(self._lives))
        callers = keep("watching --api-key-file", self._watch_callers)
        reading = keep("watching the certificate", self._watch_certificate)
        if self._options.prefill_next_turn and self._config.enable_prefix_caching:
            self.models.turns = NextTurns()
        ahead = keep("computing next turns", self._compute_next_turns)
        try:
            await asyncio.wait((stopped, loading, http), return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
                self.manager.ready(self._url)
                batches = keep("running batches", self._run_batches)
                if on_ready is not None:
                    shown = keep("the banner", partial(_shown, on_ready, self._url, self._client))
                await asyncio.wait((stopped, watching, http), return_when=asyncio.FIRST_COMPLETED)
            if http.done():
                http.result()
            if watching.done() and not stopped.done():
                return await self._after_death()
            await self._drain(http)
            return 128 + self._last_signal if self._stop_now.is_set() else EXIT_OK
        finally:
            files = callers, reading
            for task in (stopped, loading, watching, living, *files, shown, batches, ahead):
                if task is not None:
                    task.cancel()
            if batches is not None:  # end batches before the engine closes, so no line fails
                await asyncio.wait((batches,))

    async def _watch_callers(self) -> None:
        """Load the file of callers when it changes, until this task is cancelled."""
        if self._key_file is not None:
            await self._key_file.run()

    async def _watch_certificate(self) -> None:
        """Read the certificate again whenever its files change, until this task is cancelled."""
        if self.state.certificate is not None:
            await self.state.certificate.watch()

    async def _compute_next_turns(self) -> None:
        """Compute next turns of conversations while no request runs, until it is cancelled."""
        if self.models.turns is not None:
            await compute_next_turns(self.models.turns)

    async def _run_batches(self) -> None:
        """Run the batches of clients until this task is cancelled."""
        if self.state.batches is not None:
            await self.state.batches.run(create_app(self.state))

    @property
    def app(self) -> ASGIApp:
        """The ASGI application, for use with another HTTP server; call `load` before serving."""
        return self._app

    async def load(self) -> None:
        """Load tokenizer and engine concurrently; raise the first StartupError immediately."""
        tokenizer = asyncio.create_task(self._load_tokenizer())
        engine = asyncio.create_task(self._client.wait_ready())
        try:
            loaded, _ = await asyncio.gather(tokenizer, engine)
            self.context.set_ready(*loaded)
            self.models.watch_idle()
        finally:
            tokenizer.cancel()
            engine.cancel()

    async def _load_tokenizer(self) -> tuple[Tokenizer, ChatTemplate, LearnedFormat]:
        # Loaded objects stay in memory, so exclude them from garbage collections.
        # The engine takes longer to load than the tokenizer, so this call delays no response.
        gc.freeze()
        loaded = await asyncio.to_thread(load_texts, self._config)
        if self._options.audit is not None:
            found = await asyncio.to_thread(files_fingerprint, self._config)
            self.context.files_fingerprint = found
        self.context.kept = await asyncio.to_thread(kept_responses, self._config)
        gc.collect()
        gc.freeze()
        return loaded

    def _lives(self) -> bool:
        """Whether an engine responds, or has no work, or is started again."""
        return not all(replica.hung for replica in self._client.replicas)

    async def wait_ended(self) -> None:
        """Return when the only engine has died, or all replicas have died and none restarts."""
        while not self.context.ready or not self._client.ended:
            await asyncio.sleep(_POLL_S)

    async def _after_death(self) -> int:
        self.context.failed = "The engine process has died: the server will exit"
        try:
            await asyncio.wait_for(self._client.ask("check"), _DEAD_GRACE_S)
        except EngineDead as error:
            self.context.failed = error.message
        except asyncio.TimeoutError:
            pass
        log.error("%s; all running requests ended with an error", self.context.failed)
        await asyncio.sleep(_DEAD_GRACE_S)
        return EXIT_ENGINE_DEAD

    async def _drain(self, http: asyncio.Task[None]) -> None:
        """Wait until load balancers notice, then close the port and let running requests finish.

        The wait for load balancers takes drain_delay seconds,
        and running requests get at most drain_timeout seconds. A second signal ends both waits.
        """
        self.state.draining = True
        delay_s = self._options.drain_delay if self.context.ready else 0.0
        self.manager.stopping(delay_s + self._options.drain_timeout + _CLOSE_S)
        running = len(self._server.server_state.tasks)
        plan = ""
        if delay_s or running:
            plan = (
                f": new requests are accepted for {delay_s:g} s, then running requests (now "
                f"{running}) have {self._options.drain_timeout:g} s to finish; a second signal "
                "ends them immediately"
            )
        log.info("%s: shutting down%s", signal.Signals(self._first_signal).name, plan)
        stop_now = asyncio.create_task(self._stop_now.wait())
        try:
            await asyncio.wait((stop_now,), timeout=delay_s)
            self.models.stop_loading()  # otherwise a download could outlast drain_timeout
            # uvicorn now closes the port and idle connections; its task ends with the last request.
            self._server.should_exit = True
            if self.context.ready and not stop_now.done():
                waits_for = (http, stop_now)
                await asyncio.wait(
                    waits_for,
                    timeout=self._options.drain_timeout,
                    return_when=asyncio.FIRST_COMPLETED,
                )
        finally:
            stop_now.cancel()

    async def _close(self, http: asyncio.Task[None]) -> None:
        """Stop the engine, which fails running requests; then close all connections."""
        self.state.draining = self.state.stopping = True
        self._server.should_exit = True
        await asyncio.gather(self.context.close(), self.models.close())
        await asyncio.to_thread(DECODER.close)
        await asyncio.to_thread(RENDERER.close)  # its threads would delay the exit
        await asyncio.wait((http,), timeout=_FLUSH_S)
        if not http.done():
            self._server.force_exit = True
            http.cancel()
            await asyncio.wait((http,), timeout=_FLUSH_S)
        await self.state.end_background()  # before the records close, so each has its log line
        await asyncio.to_thread(self.state.records.close)

    def _take_signals(self) -> None:
        """Handle signals: the first drains, the second ends running requests, the third exits.

        The handlers stay installed, because a third signal must be able to end a slow shutdown.
        """
        loop = asyncio.get_running_loop()
        for number in stop_signals():
            loop.add_signal_handler(number, self._on_signal, number)

    def _read_again(self) -> None:
        """Read the file of callers and the certificate now: SIGHUP asks for it."""
        if self._key_file is not None:
            self._key_file.ask()
        if self.state.certificate is not None:
            self.state.certificate.ask()

    def _on_signal(self, number: int) -> None:
        if self._stop_now.is_set():
            # The engine process exits by itself as soon as its end of the socket closes.
            with suppress(OSError, ValueError):  # stderr may be a closed terminal
                sys.stderr.flush()
            os._exit(128 + number)
        if self._stop.is_set():
            log.info("%s: running requests are ended", signal.Signals(number).name)
            self._last_signal = number
            self._stop_now.set()
        else:
            self._first_signal = number
        self._stop.set()


def _seal(config: EngineConfig) -> Seal:
    """Return the seal of thoughts; replicas that share the prefix cache share its key."""
    if config.prefix_cache_dir is None:
        return Seal.kept_in(cache_dir())
    directory = Path(config.prefix_cache_dir).expanduser()
    try:
        folder = claim(directory)
    except OSError as error:  # without its mark, the folder must get no other file
        return Seal.unkept(directory, error)
    return Seal.kept_in(folder)


def _idleness(options: ServerOptions) -> Idleness:
    """Return how long models stay loaded without requests."""
    return Idleness(options.keep_alive, options.sleep_idle, _ROOM_S)


async def _shown(on_ready: ShowFn, url: str, client: EngineClient) -> None:
    """Call on_ready, which prints the banner; its errors must not end the server."""
    try:
        await on_ready(url, client)
    except (EngineDead, BrokenPipeError):  # standard output may be closed, as with `| head`
        pass
    except CpuserveError as error:  # for example, standard output is a file on a full disk
        log.warning("%s", error)
    except Exception:
        log.exception("the banner could not be shown; the server continues")
