"""uvicorn's HTTP server for the application, with the GuardedProtocol and our log format."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

import uvicorn

from cpuserve.api.http.protocol import MAX_HEADER_BYTES, GuardedProtocol, guarded_protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.types import ASGIApp

    from cpuserve.config.server import ServerOptions

_KEEP_ALIVE_S = 30


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, because front_end.py handles the signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(
    app: ASGIApp,
    options: ServerOptions,
    *,
    header_timeout_s: float = GuardedProtocol.header_timeout_s,
    write_timeout_s: float = GuardedProtocol.write_timeout_s,
) -> uvicorn.Server:
    """Return the HTTP server for `app`, which the caller runs with serve(sockets=[...])."""
    # --access-log all has a line of our own for each request.
    access_log = options.log_level == "debug" and options.access_log != "all"
    config = uvicorn.Config(
        app,
        http=guarded_protocol(header_timeout_s, write_timeout_s),
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=access_log,
        server_header=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_keep_alive=_KEEP_ALIVE_S,
    )
    _adopt_uvicorn_logs(access_log)
    return _Server(config)


def _adopt_uvicorn_logs(access_log: bool) -> None:
    """Send uvicorn's warnings, and its access log if enabled, to the handlers of our log."""
    for name, level in (("uvicorn.error", logging.WARNING), ("uvicorn.access", logging.INFO)):
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.propagate = False
        logger.addFilter(_is_not_told)
        if name == "uvicorn.error" or access_log:
            logger.handlers = list(logging.getLogger("cpuserve").handlers)


def _is_not_told(record: logging.LogRecord) -> bool:
    """Drop uvicorn's log line for invalid HTTP, because access_log.py logs it with the address."""
    return record.msg != "Invalid HTTP request received."
