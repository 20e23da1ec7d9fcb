"""Input of `cpuserve chat`: lines and Ctrl-C."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from cpuserve.cli.terminal import note

AGAIN_S = 2.0


class Lines:
    """Reads lines from standard input. On a terminal, only a second Ctrl-C ends the input."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._interrupted: float | None = None

    async def read(self) -> str | None:
        """Return the next line, stripped; None at the end of input.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed twice within AGAIN_S seconds on a terminal.
        """
        if not sys.stdin.isatty():
            line = await asyncio.to_thread(sys.stdin.readline)
            return line.strip() if line else None
        while not await _typed(sys.stdin.fileno()):
            self.interrupted()
        line = sys.stdin.readline()
        return line.strip() if line else None

    def interrupted(self) -> None:
        """Handle Ctrl-C at the prompt; the unfinished line is discarded.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed for the second time.
        """
        now, before = self._clock(), self._interrupted
        if before is not None and now - before <= AGAIN_S:
            raise KeyboardInterrupt
        self._interrupted = now
        sys.stderr.write("\n")
        note(f"press Ctrl-C again within {AGAIN_S:.0f} s to end the conversation")


async def interruptible(work: Coroutine[Any, Any, str]) -> str | None:
    """Return the result of `work`; None if Ctrl-C cancelled it."""
    task = asyncio.ensure_future(work)
    with _on_interrupt(task.cancel):
        try:
            return await task
        except asyncio.CancelledError:
            return None


@contextmanager
def _on_interrupt(call: Callable[[], object]) -> Iterator[None]:
    """Make the event loop call `call` on Ctrl-C.

    asyncio's own handler does not wake a loop that is about to wait, and loses that Ctrl-C.
    """
    import signal

    loop, before = asyncio.get_running_loop(), signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGINT, call)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)


async def _typed(terminal: int) -> bool:
    """Show the prompt and wait; return True when a line has been typed, False after Ctrl-C.

    A thread that waits in `readline` would delay Ctrl-C until the line is complete.
    """
    loop, happened, interrupted = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def interrupt() -> None:
        interrupted.set()
        happened.set()

    with _on_interrupt(interrupt):
        sys.stderr.write("> ")
        sys.stderr.flush()
        loop.add_reader(terminal, happened.set)
        try:
            await happened.wait()
        finally:
            loop.remove_reader(terminal)
    return not interrupted.is_set()
