"""Threads that find or download models. The end of the server does not wait for them.

Libraries block in a download and cannot be interrupted, and a signal must still end the server.
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
    """A signal stopped the server while its threads may still be downloading.

    The interpreter would wait for these threads at its end, so the process must exit at once, with
    exit code `code`.
    """

    def __init__(self, code: int = 0) -> None:
        super().__init__(code)
        self.code = code


def in_background(prepare: Callable[[], T]) -> Future[T]:
    """Run prepare() on a daemon thread; the result of a cancelled future is dropped."""
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
    """Return whether a thread of in_background still runs."""
    return any(thread.name == _NAME for thread in threading.enumerate())
