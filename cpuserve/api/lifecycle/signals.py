"""The signals that stop the server, and SIGHUP, which reads files again and never stops it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

# All of these signals drain the server. Ctrl-\ sends SIGQUIT, and so do supervisors that stop
# programs as nginx is stopped. Without handlers, they would kill the server and its streams.
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop the server.

    SIGQUIT is left out if it was ignored when the server was started.
    """
    return [
        number
        for number in _STOP_SIGNALS
        if number is not signal.SIGQUIT or signal.getsignal(number) is not signal.SIG_IGN
    ]


@contextmanager
def hangups_ignored() -> Iterator[None]:
    """Ignore SIGHUP until the end of the `with` block, as while the server loads or ends."""
    with _hangups(signal.SIG_IGN):
        yield


@contextmanager
def hangups_call(call: Callable[[], object]) -> Iterator[None]:
    """Let the running event loop call `call` at each SIGHUP, until the end of the `with` block.

    A handler of asyncio would be removed with its loop, and SIGHUP would then end the process.
    """
    loop = asyncio.get_running_loop()

    def handle(*_: object) -> None:
        with suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(call)

    with _hangups(handle):
        yield


@contextmanager
def _hangups(handler: Any) -> Iterator[None]:
    before = signal.signal(signal.SIGHUP, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)
