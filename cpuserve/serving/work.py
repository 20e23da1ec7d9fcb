"""RequestWork: one piece of work, and all that is reserved for it until it ends."""

from __future__ import annotations

import time
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from cpuserve.base.log import get_logger
from cpuserve.base.waits import Intervals

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator

log = get_logger("serve")


class RequestWork:
    """All that is reserved for one piece of work, given back once, when the work ends.

    A response begins the work and ends it, unless a task continues it: then the response has only
    borrowed it, and its client may leave. Threads that still run for the work delay its end,
    because their memory must stay reserved.

    waits: what held it back before it reached the engine.
    """

    def __init__(self) -> None:
        self.waits = Intervals()
        self._held: list[Callable[[], object]] = []
        self._has_response = True
        self._users = 1

    @property
    def ended(self) -> bool:
        """Whether everything has been given back."""
        return self._users == 0

    def hold(self, give_back: Callable[[], object]) -> None:
        """Call give_back() when the work ends, the last one first; at once if it has ended."""
        if self.ended:
            give_back()
        else:
            self._held.append(give_back)

    def wait_for(self, running: asyncio.Future[Any]) -> None:
        """Let the work end only after `running` too."""
        self._users += 1
        running.add_done_callback(lambda _: self._leave())

    def continue_in(self, task: asyncio.Future[Any]) -> None:
        """Let the work end with `task`, no longer with its response."""
        self.wait_for(task)
        self.response_ended()

    def response_ended(self) -> None:
        """Note that the response has ended, or its client has left; repeated calls do nothing."""
        if self._has_response:
            self._has_response = False
            self._leave()

    def _leave(self) -> None:
        self._users -= 1
        while self.ended and self._held:
            try:
                self._held.pop()()
            except Exception:  # the others have to be given back as well
                log.exception("a part of what a request had reserved was not given back")


# The work that the current task runs for; None = no request.
CURRENT_WORK: ContextVar[RequestWork | None] = ContextVar("current_work", default=None)


def note_wait(cause: str, begin: float) -> None:
    """Note that the current request has waited since `begin` (time.monotonic()), until now."""
    if (work := CURRENT_WORK.get()) is not None:
        work.waits.add(cause, begin, time.monotonic())


@contextmanager
def waiting_for(cause: str) -> Iterator[None]:
    """Note that the current request waits in this block; for the causes see base/waits.py."""
    begin = time.monotonic()
    try:
        yield
    finally:
        note_wait(cause, begin)
