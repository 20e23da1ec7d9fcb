"""Read lines of input and handle Ctrl-C in `cpuserve chat`."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cpuserve.cli.terminal import note

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

AGAIN_S = 2.0


class Lines:
    """Reads lines from standard input. On a terminal, only a second Ctrl-C ends the input.

    On a terminal, users can edit a line, and recall earlier lines with the arrow keys. A pasted
    block becomes one line, which may contain line breaks. Earlier lines are kept only in memory.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._interrupted: float | None = None
        self._session: PromptSession[str] | None = None

    async def read(self) -> str | None:
        """Return the next line without surrounding white space; None at the end of input.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed twice within AGAIN_S seconds on a terminal.
        """
        if not sys.stdin.isatty():
            line = await asyncio.to_thread(sys.stdin.readline)
            return line.strip() if line else None
        if self._session is None:
            self._session = _session()
        while True:
            try:
                return (await self._session.prompt_async("> ")).strip()
            except EOFError:
                return None
            except KeyboardInterrupt:
                self.interrupted()

    def interrupted(self) -> None:
        """Handle Ctrl-C at the prompt; the unfinished line is discarded.

        Raises:
            KeyboardInterrupt: this is the second Ctrl-C within AGAIN_S seconds.
        """
        now, before = self._clock(), self._interrupted
        if before is not None and now - before <= AGAIN_S:
            raise KeyboardInterrupt
        self._interrupted = now
        note(f"press Ctrl-C again within {AGAIN_S:.0f} s to end the conversation")


def _session() -> PromptSession[str]:
    """Return a line editor that draws on standard error, because stdout is for responses."""
    from prompt_toolkit import PromptSession  # imported here because it takes 0.1 s
    from prompt_toolkit.output import create_output

    output = create_output(stdout=sys.stderr)
    if hasattr(output, "enable_cpr"):
        output.enable_cpr = False  # some terminals do not report the cursor position
    return PromptSession(output=output)


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
    """Make the event loop call `call` when Ctrl-C is pressed.

    The handler of asyncio does not wake a loop that is about to wait, and so loses a Ctrl-C.
    """
    import signal

    loop, before = asyncio.get_running_loop(), signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGINT, call)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)
