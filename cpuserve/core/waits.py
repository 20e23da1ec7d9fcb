"""QueueWaits: how long each cause holds a request back before its first token.

From one step to the next, one cause holds back the whole queue, so a clock counts the seconds of
each cause, and a request reads it when it enters and leaves the queue: a step costs the same for
ten waiting requests and for thousands. What holds back a single request is counted in it.
"""

from __future__ import annotations

from heapq import nsmallest

from cpuserve.base.waits import add_seconds
from cpuserve.core.queue import WaitingQueue
from cpuserve.core.request import Request


class QueueClock:
    """The seconds that each cause has held back the queue."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._cause = "step"
        self._since = 0.0

    def turn(self, now: float, cause: str | None = None) -> None:
        """Count the time until now; another cause begins now, or the last one continues."""
        add_seconds(self.seconds, self._cause, now - self._since)
        self._cause, self._since = cause or self._cause, now


class QueueWaits:
    """Counts the waits of all requests of a scheduler; `now` is time.monotonic()."""

    def __init__(self) -> None:
        # Requests whose grammar gives bitmasks can have another cause than all others.
        self._clocks = {masked: QueueClock() for masked in (False, True)}
        self._new: list[Request] = []
        self._started: list[Request] = []

    def came(self, request: Request, since: float) -> None:
        """Let a request wait for the next step: it is new, ready now, or was preempted."""
        self.hold(request, "step", since)
        self._new.append(request)

    def hold(self, request: Request, cause: str, now: float) -> None:
        """Let a cause hold back one request from now on."""
        if request.wait.cause != cause:
            self.end(request, now)
            request.wait.cause, request.wait.since = cause, now

    def end(self, request: Request, now: float) -> None:
        """Count what has held back a request until now."""
        wait = request.wait
        seconds = wait.held if request.scheduled else wait.queued
        if wait.mark is not None:
            clock = self._clocks[request.masked]
            clock.turn(now)
            for cause, total in clock.seconds.items():
                if (passed := total - wait.mark.get(cause, 0.0)) > 0.0:
                    add_seconds(seconds, cause, passed)
            wait.mark = None
        elif wait.cause:
            add_seconds(seconds, wait.cause, now - wait.since)
        wait.cause = ""

    def started(self, request: Request, now: float) -> None:
        """End the wait of a request that gets a slot now."""
        self.end(request, now)
        self._started.append(request)

    def scheduled(self, causes: dict[bool, str], now: float) -> None:
        """Note what holds back the queue from this step on; see `_clocks` for `causes`."""
        for masked, clock in self._clocks.items():
            clock.turn(now, causes[masked])
        for request in self._new:
            if request.wait.cause == "step" and not request.is_running:
                self.end(request, now)
                request.wait.mark = dict(self._clocks[request.masked].seconds)
        self._new.clear()

    def pass_over(self, waiting: WaitingQueue, now: float, *, in_order: bool) -> None:
        """Find the requests that would have started in this step in the order of arrival.

        in_order: whether that was the order.
        """
        started, self._started = self._started, []
        if in_order or not started:
            return
        count = len(started)
        candidates = [*started, *waiting.held_back(count)]
        for oldest in nsmallest(count, candidates, key=lambda request: request.order):
            later = [r for r in started if r.order > oldest.order and not r.continues]
            if oldest.is_running or not later:
                continue
            if any(r.params.caller != oldest.params.caller for r in later):
                self.hold(oldest, "share", now)
            elif any(r.priority < oldest.priority for r in later):
                self.hold(oldest, "priority", now)
