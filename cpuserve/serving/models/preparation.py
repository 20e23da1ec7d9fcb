"""Threads that find or download models. The exit of the server does not wait for them.

Libraries block during a download and cannot be interrupted, but a signal must end the server.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

_NAME = "cpuserve-prepare"


class StoppedWhilePreparing(Exception):
    """A signal stopped the server while its threads may still be downloading a model.

    At its exit, the interpreter would wait for these threads, so the process must exit directly,
    with the exit code `code`.
    """

    def __init__(self, code: int = 0) -> None:
        super().__init__(code)
        self.code = code


def in_background(prepare: Callable[[], T]) -> Future[T]:
    """Run prepare() on a daemon thread; if the future is cancelled, its result is dropped."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            found = prepare()
        except BaseException as error:
            with suppress(InvalidStateError):
                result.set_exception(error)
        else:
            with suppress(InvalidStateError):
                result.set_result(found)

    threading.Thread(target=run, name=_NAME, daemon=True).start()
    return result


def is_preparing() -> bool:
    """Return whether a thread that `in_background` started is still running."""
    return any(thread.name == _NAME for thread in threading.enumerate())
