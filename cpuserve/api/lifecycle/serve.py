"""`cpuserve serve`: start the server, in the steps that cpuserve.api.lifecycle lists.

FastAPI and the tokenizer are loaded while the engine loads the model,
so this file must not import anything heavy at its top.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from cpuserve.api.callers.key_file import read_key_file
from cpuserve.api.http.listener import (
    Listener,
    is_loopback,
    open_listener,
    raise_file_limit,
    url_of,
)
from cpuserve.api.http.startup_server import StartupServer
from cpuserve.api.lifecycle.engines import start_engines
from cpuserve.api.lifecycle.service_manager import ServiceManager
from cpuserve.api.lifecycle.signals import hangups_ignored, stop_signals
from cpuserve.base.affinity import affinity
from cpuserve.base.errors import ConfigError
from cpuserve.base.log import get_logger
from cpuserve.base.lost_signals import sent_again
from cpuserve.config.env import environment
from cpuserve.config.server import ServerOptions
from cpuserve.engine.launch import SpareProcess
from cpuserve.platforms.heap import bound_heaps
from cpuserve.serving.models.preparation import StoppedWhilePreparing, in_background, is_preparing

if TYPE_CHECKING:
    from types import FrameType

    from cpuserve.api.lifecycle.front_end import FrontEnd
    from cpuserve.config.engine import EngineConfig
    from cpuserve.config.several import NamedModel
    from cpuserve.engine.client import EngineClient
    from cpuserve.engine.ipc import StageProgress
    from cpuserve.engine.replicas import ReplicaClient
    from cpuserve.prepare import Prepared

log = get_logger("serve")

ProgressFn = Callable[[str, int, int], None]
ReadyFn = Callable[["Prepared", str, "EngineClient"], Awaitable[None]]
PrepareFn = Callable[[int], "Prepared"]
FurtherFn = Callable[[str, str, "str | None", "str | None"], "tuple[NamedModel, PrepareFn]"]
T = TypeVar("T")


def serve(
    prepare: Callable[[ProgressFn], Prepared],
    options: ServerOptions | None = None,
    *,
    progress: ProgressFn | None = None,
    on_ready: ReadyFn | None = None,
    others: Sequence[tuple[NamedModel, PrepareFn]] = (),
    further: FurtherFn | None = None,
) -> int:
    """Serve until a signal stops the server; return the exit code.

    The exit code is 0 after a signal. It is 1 if options.engine_restart is off
    and all engines have died; otherwise an engine that dies is restarted.

    prepare(progress) finds the model, perhaps by a long download, and resolves its settings on a
    thread. progress(stage, done, total) is called while `prepare` runs and the engine loads.
    on_ready(prepared, url, client) prints the banner when the server is ready.

    others: (model, prepare) of each further model, which is loaded when a request needs it;
      prepare(promised_bytes) gets the bytes of free memory that loaded models may still take.
    further: a function of (name, model, adapter, quantization);
      it returns the pair (model, prepare) for a model that a client creates.

    Raises:
      StartupError: the port is in use, `prepare` raised it, or the engine cannot load the model.
      StoppedWhilePreparing: a signal arrived while a model was being prepared.
    """
    options = options or ServerOptions()
    bound_heaps()
    if options.api_key_file is not None:
        read_key_file(options.api_key_file)  # an error ends the start before the model is loaded
    raise_file_limit()
    try:
        with (
            hangups_ignored(),
            _stop_signals_raise(),
            open_listener(options) as listener,
            closing(SpareProcess(affinity())) as spare,
        ):
            _warn_if_open(options)
            return _run(listener, prepare, options, progress, on_ready, others, further, spare)
    except _Stopped as stopped:
        log.info("%s: stopped before the server was ready", stopped)
        return 0


def _run(
    listener: Listener,
    prepare: Callable[[ProgressFn], Prepared],
    options: ServerOptions,
    progress: ProgressFn | None,
    on_ready: ReadyFn | None,
    others: Sequence[tuple[NamedModel, PrepareFn]],
    further: FurtherFn | None,
    spare: SpareProcess,
) -> int:
    """Start the parts of the server after the port is bound, serve, and return the exit code."""
    starting, manager = StartupServer(listener), ServiceManager(environment())
    reports = LoadingReports(progress, manager.loading)
    reports.also = starting.on_progress
    try:
        prepared = _wait(in_background(lambda: prepare(reports.tell)))
        resolved = prepared.resolved
        _check_names([model for model, _ in others], resolved.config)
        client = start_engines(resolved, reports, restart=options.engine_restart, spare=spare)
        try:
            _pin(resolved.config.frontend_cpus)
            url = url_of(listener)
            front_end = _front_end(client, prepared, options, url, others, further, spare)
            front_end.manager = manager
        except BaseException:
            client.kill()
            raise
        reports.also = front_end.on_progress
        client.on_step = front_end.on_step
    finally:
        starting.stop()
    shown = None if on_ready is None else partial(on_ready, prepared)
    code = asyncio.run(front_end.run(listener, shown))
    log.info("stopped with exit code %d", code)
    if is_preparing():  # a request has started the download of another model
        raise StoppedWhilePreparing(code)
    return code


def _front_end(
    client: ReplicaClient,
    prepared: Prepared,
    options: ServerOptions,
    url: str,
    others: Sequence[tuple[NamedModel, PrepareFn]],
    further: FurtherFn | None,
    spare: SpareProcess,
) -> FrontEnd:
    """Import FastAPI while the engine loads, and return the front end."""
    from cpuserve.api.lifecycle.created import Creation
    from cpuserve.api.lifecycle.front_end import FrontEnd
    from cpuserve.api.lifecycle.loaders import EngineSleeper, ModelLoader
    from cpuserve.api.lifecycle.model_details import details_of
    from cpuserve.prepare import kv_cache_bytes

    def make_loader(
        name: str, model: str, adapter: str | None, quantization: str | None
    ) -> ModelLoader:
        assert further is not None
        made, how = further(name, model, adapter, quantization)
        return ModelLoader(made, how, options, spare)

    sources = dict.fromkeys(prepared.resolved.config.served_model_names, prepared.facts.path)
    sources |= {model.name: model.asked.options.model or "" for model, _ in others}
    return FrontEnd(
        client,
        prepared.resolved.replicas,
        options,
        url,
        prepared.platform,
        kv_bytes=kv_cache_bytes(prepared),
        details=details_of(prepared),
        loaders=[ModelLoader(model, how, options, spare) for model, how in others],
        sleeper=EngineSleeper(client, prepared, spare),
        creation=None if further is None else Creation(make_loader, sources),
    )


def _check_names(others: Sequence[NamedModel], first: EngineConfig) -> None:
    """Raise ConfigError if a further model has a name of the first model or of its adapters."""
    for model in others:
        for name in (model.name, *model.aliases, *model.adapters):
            what = "the first model" if name in first.served_model_names else "an adapter"
            if name in (*first.served_model_names, *first.adapters):
                source = model.asked.sources["model"]
                msg = f"{source}: {name}: {what} has this name: choose another"
                raise ConfigError(msg)


def _wait(preparing: Future[T]) -> T:
    """Wait for the result of `preparing`; StoppedWhilePreparing if a signal comes first."""
    try:
        return preparing.result()
    except _Stopped as stopped:
        log.info("%s: stopped before the server was ready", stopped)
        raise StoppedWhilePreparing from None


def _pin(cpus: list[int] | None) -> None:
    """Pin this process and its future threads to `cpus`; log a warning if pinning fails."""
    if not cpus or not hasattr(os, "sched_setaffinity"):  # macOS cannot pin processes
        return
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:  # the cpuset has changed, or a sandbox forbids pinning
        log.warning("the front end cannot be pinned to CPU %s: %s", cpus, error.strerror)


class LoadingReports:
    """Passes progress reports of loading to the terminal, the service manager and /health."""

    def __init__(self, *listeners: ProgressFn | None) -> None:
        self._listeners = listeners
        self.also: ProgressFn | None = None

    def __call__(self, report: StageProgress) -> None:
        """Pass on a progress report of the engine."""
        self.tell(report.stage, report.done, report.total)

    def tell(self, stage: str, done: int, total: int) -> None:
        """Report that `done` of the `total` bytes of a loading stage are finished."""
        for listener in (*self._listeners, self.also):
            if listener is not None:
                listener(stage, done, total)


class _Stopped(BaseException):
    """A stop signal arrived before the event loop handled signals; its text is the signal name."""


@contextmanager
def _stop_signals_raise() -> Iterator[None]:
    """Make stop signals raise _Stopped, until the event loop installs its own handlers."""

    def stop(number: int, _frame: FrameType | None) -> None:
        raise _Stopped(signal.Signals(number).name)

    def number_of(error: BaseException | None) -> int | None:
        return signal.Signals[str(error)] if isinstance(error, _Stopped) else None

    before = {number: signal.signal(number, stop) for number in stop_signals()}
    try:
        with sent_again(number_of):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _warn_if_open(options: ServerOptions) -> None:
    if options.socket or options.asks_for_keys or is_loopback(options.host):
        return
    log.warning(
        "listening on %s without an API key: everyone who can connect to this address can use "
        "the server. Set CPUSERVE_API_KEY or --api-key-file, or leave --host at 127.0.0.1",
        options.host,
    )
