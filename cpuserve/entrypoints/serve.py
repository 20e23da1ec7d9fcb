"""`cpuserve serve`: port, engine process, HTTP server, in this order.

The port is bound first, so that a taken one is told at once; the engine is spawned next; FastAPI
and the tokenizer are imported and loaded while it loads. /health answers 503 meanwhile. Nothing
heavy may be imported at the top of this file.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import signal
import socket
import stat
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cpuserve.entrypoints.listener import Listener, raise_file_limit
from cpuserve.errors import ConfigError
from cpuserve.log import get_logger

if TYPE_CHECKING:
    from types import FrameType

    from cpuserve.config.engine import Resolved
    from cpuserve.engine.client import EngineClient
    from cpuserve.engine.ipc import Progress
    from cpuserve.engine.process import ProcessClient
    from cpuserve.engine.replicas import ReplicaClient
    from cpuserve.platforms import Platform

log = get_logger("serve")

ProgressFn = Callable[[str, int, int], None]
ReadyFn = Callable[[str, "EngineClient"], Awaitable[None]]

_BACKLOG = 2048
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """How the front end listens; `uds` is a socket path instead of host and port.

    drain_s: how long running requests may go on after the first signal; what is left then is
    ended with an error. Closing the rest takes at most 2 s more. silent_s: after how long without
    an event a stream sends a comment. max_queued_*: what may wait for a first token. longest_s:
    when a request that is not finished ends with an error; None = never.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    api_keys: Sequence[str] = ()
    access_log: bool = False
    drain_s: float = 3.0
    header_timeout_s: float = 15.0
    write_timeout_s: float = 30.0
    silent_s: float = 15.0
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1 << 20
    longest_s: float | None = None


def serve(
    resolved: Resolved,
    http: HttpOptions | None = None,
    *,
    progress: ProgressFn | None = None,
    on_ready: ReadyFn | None = None,
    platform: Platform | None = None,
) -> int:
    """Serve until a signal (returns 0) or the engine's death (returns 1).

    Of several engines a dead one is started again; 1 when all have been given up.

    `platform` made `resolved` (None: the built-in one) and is asked for GET /v1/cpu.
    progress(stage, done, total) is called while the engine loads; on_ready(url, client) runs beside
    the server once it serves, for the banner.

    Raises:
      StartupError: the port is taken, or the engine cannot load the model.
    """
    http = http or HttpOptions()
    raise_file_limit()
    with bound(http) as listener:
        _warn_if_open(http)
        try:
            with _stop_signals_raise():
                return _run(listener, resolved, http, progress, on_ready, platform)
        except _Stopped:
            return 0


def _run(
    listener: socket.socket,
    resolved: Resolved,
    http: HttpOptions,
    progress: ProgressFn | None,
    on_ready: ReadyFn | None,
    platform: Platform | None,
) -> int:
    reports = LoadingReports(progress)
    client = start_engines(resolved, reports)
    try:
        _pin(resolved.config.frontend_cpus)
        from cpuserve.entrypoints.openai.server import FrontEnd
        from cpuserve.platforms import select
    except BaseException:
        client.kill()
        raise
    floor = platform or select("cpu")[0]
    front_end = FrontEnd(client, resolved.replicas, http, url_of(listener), floor)
    reports.also = front_end.on_progress
    client.on_step = front_end.on_step
    return asyncio.run(front_end.run(listener, on_ready))


def start_engines(
    resolved: Resolved, on_progress: Callable[[Progress], None]
) -> ProcessClient | ReplicaClient:
    """Start the engine, or all of them, and return at once."""
    if resolved.others:
        from cpuserve.engine.replicas import ReplicaClient

        return ReplicaClient.spawn(resolved.replicas, on_progress=on_progress)
    from cpuserve.engine.process import ProcessClient

    return ProcessClient.spawn(resolved.config, on_progress=on_progress)


def _pin(cpus: list[int] | None) -> None:
    """Keep this process, and the threads it will start, on `cpus`; a refusal is a line."""
    if not cpus:
        return
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:  # the cpuset has changed, or a sandbox forbids it
        log.warning("the front end cannot be kept on CPU %s: %s", cpus, error.strerror)


class LoadingReports:
    """Passes the engine's progress on to the terminal and, once it exists, to /health."""

    def __init__(self, progress: ProgressFn | None) -> None:
        self._progress = progress
        self.also: ProgressFn | None = None

    def __call__(self, report: Progress) -> None:
        """One report."""
        for listener in (self._progress, self.also):
            if listener is not None:
                listener(report.stage, report.done, report.total)


class _Stopped(BaseException):
    """A signal came before the event loop could take it."""


@contextmanager
def _stop_signals_raise() -> Iterator[None]:
    """Until the event loop takes the signals, they raise _Stopped wherever the start is."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise _Stopped

    before = {number: signal.signal(number, stop) for number in _STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def bound(http: HttpOptions) -> Iterator[socket.socket]:
    """The listening socket; ConfigError if the address cannot be had."""
    listener = _bind_unix(Path(http.uds)) if http.uds else _bind_tcp(http.host, http.port)
    try:
        # Listening, not only bound: two sockets may share an address until one of them listens.
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        yield listener
    finally:
        listener.close()
        if http.uds:
            Path(http.uds).unlink(missing_ok=True)


def _bind_tcp(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        msg = f"cannot listen on {host}: {error}. Give an address of this machine with --host"
        raise ConfigError(msg) from None
    listener = Listener(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1)
    except OSError as error:
        listener.close()
        msg = (
            f"cannot listen on {host} port {port}: {os.strerror(error.errno or 0)}. "
            "Give another with --port, or --port 0 for a free one"
        )
        raise ConfigError(msg) from None
    return listener


def _bind_unix(path: Path) -> socket.socket:
    listener = Listener(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        msg = f"cannot listen on the socket {path}: {error.strerror or error}"
        raise ConfigError(msg) from None
    return listener


def _remove_stale(path: Path) -> None:
    """Remove a socket nobody listens on, which a killed server leaves; nothing else."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()


def url_of(listener: socket.socket) -> str:
    """Where a client on this machine reaches the listener."""
    address = listener.getsockname()
    if isinstance(address, str):
        return f"unix:{address}"
    host = str(address[0])
    return f"http://{f'[{host}]' if ':' in host else host}:{address[1]}"


def _warn_if_open(http: HttpOptions) -> None:
    if http.uds or http.api_keys or _is_loopback(http.host):
        return
    log.warning(
        "listening on %s without an API key: everyone who reaches this address can use the "
        "server. Set CPUSERVE_API_KEY, or leave --host at 127.0.0.1",
        http.host,
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
