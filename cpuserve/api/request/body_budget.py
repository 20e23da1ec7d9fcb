"""Limit the total bytes of request bodies in memory, including unfinished uploads."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from cpuserve.api.errors.http_errors import ServerBusy
from cpuserve.core.turns import CallerTurns
from cpuserve.serving.work import waiting_for

if TYPE_CHECKING:
    from types import TracebackType


class BodyBudget:
    """Limits the bytes that all request bodies together hold in memory.

    A body reserves its whole length before it is read, in turns of the callers (core/turns.py),
    so every body that was started can finish.
    A body larger than the budget is admitted when no other body is in memory.

    A caller with less than its share (the budget divided by the number of callers that hold some)
    is admitted although others have filled the budget, for example with bodies that they send
    slowly. So bodies may hold up to twice the budget. The caller "" (unknown) has no share.
    """

    def __init__(self, most: int) -> None:
        self.held = 0
        self._most = most
        self._of: dict[str, int] = {}  # the callers that hold bytes, with how many
        self._waiting: CallerTurns[tuple[int, asyncio.Future[None]]] = CallerTurns()

    async def take(self, size: int, wait_s: float, caller: str = "") -> None:
        """Reserve `size` bytes; ServerBusy (503) if they are not free within `wait_s` seconds."""
        if self._has_share(size, caller) or (not self._waiting and self._fits(size)):
            self._hold(size, caller)
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (size, granted)
        self._waiting.put(caller, entry, float(size))
        try:
            with waiting_for("body"):
                await asyncio.wait((granted,), timeout=wait_s)
        except asyncio.CancelledError:
            self._withdraw(entry, caller)
            raise
        if not granted.done():
            self._withdraw(entry, caller)
            msg = (
                f"The server holds {self.held} bytes of other request bodies, and the limit is "
                f"{self._most} bytes: try again later"
            )
            raise ServerBusy(msg, retry_after_s=wait_s)

    def give_back(self, size: int, caller: str = "") -> None:
        """Free `size` bytes that `caller` has reserved, and admit bodies that wait for memory."""
        self._hold(-size, caller)
        while (name := self._next()) is not None:
            _, (wanted, granted) = self._waiting.take(name)
            self._hold(wanted, name)
            granted.set_result(None)

    def _next(self) -> str | None:
        """Return the caller of the waiting body that may be read now; None = no body may be."""
        for place, (name, (size, _)) in enumerate(self._waiting.firsts()):
            if self._has_share(size, name) or (place == 0 and self._fits(size)):
                return name
        return None

    def _hold(self, size: int, caller: str) -> None:
        self.held += size
        self._of[caller] = self._of.get(caller, 0) + size
        if not self._of[caller]:
            del self._of[caller]

    def _fits(self, size: int) -> bool:
        return self.held == 0 or self.held + size <= self._most

    def _has_share(self, size: int, caller: str) -> bool:
        """Return whether others hold bytes, and this caller has less than its share with `size`."""
        callers = len(self._of) + (caller not in self._of)
        return (
            bool(caller)
            and callers > 1
            and self._of.get(caller, 0) + size <= self._most // callers
            and self.held + size <= 2 * self._most
        )

    def _withdraw(self, entry: tuple[int, asyncio.Future[None]], caller: str) -> None:
        size, granted = entry
        if granted.done():
            self.give_back(size, caller)
        else:
            self._waiting.remove(entry)
            self.give_back(0, caller)  # smaller bodies later in the queue may fit now


class Reservation:
    """The bytes that one body has reserved; they are freed at the end of the `with` block."""

    def __init__(self, budget: BodyBudget, caller: str = "") -> None:
        self.size = 0
        self._budget = budget
        self._caller = caller

    async def take(self, size: int, wait_s: float) -> None:
        """Reserve `size` more bytes; see BodyBudget.take."""
        await self._budget.take(size, wait_s, self._caller)
        self.size += size

    def shrink(self, size: int) -> None:
        """Free all reserved bytes except the first `size` bytes."""
        if size < self.size:
            self._budget.give_back(self.size - size, self._caller)
            self.size = size

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shrink(0)
