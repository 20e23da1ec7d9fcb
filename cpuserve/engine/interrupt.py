"""Interrupt: ends a step in the middle when nobody waits for any request in it any more.

Aborts arrive on another thread while the engine's is inside a step that may take seconds (a long
prompt). That thread shows them to `see`, then puts them where the engine finds them after the step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from cpuserve.core.request import Request
from cpuserve.engine.ipc import Abort, Inbound, Shutdown


class Interrupt:
    """Which aborts have arrived and not been handled, and which requests the running step has.

    cancel(True) is called, from any thread, to end the running step, or else the next;
    cancel(False), between steps, when that came too late.
    """

    def __init__(self, cancel: Callable[[bool], None]) -> None:
        self._cancel = cancel
        self._lock = threading.Lock()
        self._aborted: set[int] = set()
        self._everything = False
        self._running: Sequence[Request] = ()
        self._cancelled = False

    def see(self, message: Inbound) -> None:
        """From any thread, before the engine can take `message` from its inbox."""
        if not isinstance(message, Abort | Shutdown):
            return
        with self._lock:
            if isinstance(message, Abort):
                self._aborted.update(message.ids)
            else:
                self._everything = True
            self._check()

    def handled(self, ids: Iterable[int]) -> None:
        """These aborts have been carried out."""
        with self._lock:
            self._aborted.difference_update(ids)

    def begin(self, requests: Sequence[Request]) -> None:
        """A step of `requests` is about to run."""
        with self._lock:
            self._running = requests
            if self._aborted or self._everything:
                self._check()

    def end(self) -> bool:
        """The step is over; True if it was told to end early, and so may not have finished."""
        with self._lock:
            self._running = ()
            cancelled, self._cancelled = self._cancelled, False
            if cancelled:
                self._cancel(False)
            return cancelled

    def _check(self) -> None:
        running = self._running
        if not running or self._cancelled:
            return
        if self._everything or all(request.id in self._aborted for request in running):
            self._cancelled = True
            self._cancel(True)
