"""Interrupt: end a running step early if all its requests were aborted, or for a new request.

A step with a long prompt may take seconds. Meanwhile a reader thread receives messages.
It passes each message to `see`, and puts it into the inbox that the engine reads after the step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from cpuserve.core.request import Request
from cpuserve.engine.ipc import Abort, AddRequest, Inbound, Shutdown

EndsFor = Callable[[AddRequest], bool]
Reason = Literal["", "left", "came"]


class Interrupt:
    """The messages that the engine has not handled yet, and the requests of the running step.

    Interrupt calls cancel(True), from any thread, to end the running step. After the step it calls
    cancel(False). Otherwise a cancel(True) that came too late would end the next step.
    """

    def __init__(self, cancel: Callable[[bool], None]) -> None:
        self._cancel = cancel
        self._lock = threading.Lock()
        self._aborted: set[int] = set()
        self._added: dict[int, AddRequest] = {}
        self._everything = False
        self._running: Sequence[Request] = ()
        self._ends_for: EndsFor | None = None
        self._reason: Reason = ""

    def see(self, message: Inbound) -> None:
        """Note `message`; called from any thread, before it is put into the engine's inbox."""
        with self._lock:
            if isinstance(message, Abort):
                self._aborted.update(message.ids)
            elif isinstance(message, AddRequest):
                self._added[message.id] = message
            elif isinstance(message, Shutdown):
                self._everything = True
            else:
                return
            self._check([message] if isinstance(message, AddRequest) else [])

    def handled(self, ids: Iterable[int]) -> None:
        """Remove these aborts, because the engine has handled them."""
        with self._lock:
            self._aborted.difference_update(ids)

    def added(self, number: int) -> None:
        """Remove the AddRequest with this number, because the engine has handled it."""
        with self._lock:
            self._added.pop(number, None)

    def begin(self, requests: Sequence[Request], ends_for: EndsFor | None = None) -> None:
        """Note that a step with these requests starts.

        ends_for: returns whether the running step should end early for a new request.
        Any thread may call it while the engine's thread is inside the executor.
        """
        with self._lock:
            self._running, self._ends_for = requests, ends_for
            if self._aborted or self._added or self._everything:
                self._check(self._added.values())

    def end(self) -> Reason:
        """Note that the step is over; return why it should have ended early, or "".

        "left": all its requests were aborted. "came": a new request should not wait for its end.
        """
        with self._lock:
            self._running, self._ends_for = (), None
            reason, self._reason = self._reason, ""
            if reason:
                self._cancel(False)
            return reason

    def _check(self, came: Iterable[AddRequest]) -> None:
        running = self._running
        if not running or self._reason:
            return
        if self._everything or all(request.id in self._aborted for request in running):
            self._reason = "left"
        elif self._ends_for is not None and any(map(self._ends_for, came)):
            self._reason = "came"
        if self._reason:
            self._cancel(True)
