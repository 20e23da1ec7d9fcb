"""Read --api-key-file again when it changes, or when a signal asks for it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from cpuserve.api.callers.key_file import read_key_file, state_of
from cpuserve.errors import ConfigError
from cpuserve.log import get_logger

if TYPE_CHECKING:
    from cpuserve.api.callers.known_callers import KnownCallers

log = get_logger("serve")

# Kubernetes sends no signal when it replaces a mounted file.
PERIOD_S = 2.0


class KeyFileWatch:
    """Looks at the file every period_s seconds, and loads it when it has changed.

    A file that is not replaced, but written in place, may be incomplete at first. So a change
    is loaded when two looks have found the same file.
    """

    def __init__(self, callers: KnownCallers, period_s: float = PERIOD_S) -> None:
        """callers: they have a file."""
        assert callers.file is not None
        assert callers.loaded is not None
        self._callers = callers
        self._path = callers.file
        self._period_s = period_s
        self._settled: tuple[int, ...] | None = callers.loaded.state
        self._seen: tuple[int, ...] | None = self._settled
        self._asked = asyncio.Event()
        self.looks = 0

    def ask(self) -> None:
        """Load the file now, whether it has changed or not."""
        self._asked.set()

    async def run(self) -> None:
        """Watch the file until this task is cancelled."""
        while True:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._asked.wait(), self._period_s)
            if self._asked.is_set():
                self._asked.clear()
                await self._load(await asyncio.to_thread(self._state))
            else:
                await self._look()
            self.looks += 1

    async def _look(self) -> None:
        found = await asyncio.to_thread(self._state)
        same, self._seen = found == self._seen, found
        if same and found != self._settled:
            await self._load(found)

    def _named(self) -> set[str]:
        return {caller.name for caller in self._callers.named()}

    def _state(self) -> tuple[int, ...] | None:
        """Return the state of the file, or None if there is none. Links are followed."""
        try:
            return state_of(Path(self._path).expanduser().stat())
        except OSError:
            return None

    async def _load(self, found: tuple[int, ...] | None) -> None:
        """Load the file; if it cannot be used, log the error once and keep the earlier keys."""
        self._settled = self._seen = found
        before = self._named()
        try:
            read = await asyncio.to_thread(read_key_file, self._path)
            self._callers.load(read)
        except ConfigError as error:
            log.error("%s. The callers of the earlier file remain", error)
            return
        self._settled = self._seen = read.state
        now = self._named()
        log.info(
            "--api-key-file %s was read again: %d callers, new %s, removed %s",
            self._path,
            len(now),
            _shown(now - before),
            _shown(before - now),
        )


def _shown(found: set[str]) -> str:
    return ", ".join(sorted(found)[:20]) + (", ..." if len(found) > 20 else "") or "none"
