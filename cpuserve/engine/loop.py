"""The engine's loop over a channel: the same for a child process and for a thread."""

from __future__ import annotations

from typing import Protocol

from cpuserve.engine.core import EngineCore
from cpuserve.engine.interrupt import Interrupt
from cpuserve.engine.ipc import Inbound, Outbound, Shutdown


class Channel(Protocol):
    """Where messages come from and go to."""

    def watch(self, interrupt: Interrupt) -> None:
        """From now on tell `interrupt` of aborts and Shutdown when they arrive."""

    def receive(self, *, block: bool) -> list[Inbound]:
        """All messages that are there; with `block`, at least one. EOFError: nobody is there."""

    def send(self, message: Outbound) -> None:
        """Hand one message over. EOFError: nobody is there."""


def run_loop(core: EngineCore, channel: Channel) -> None:
    """Serve until Shutdown; idle, it waits in receive() and uses no CPU."""
    channel.watch(core.interrupt)
    while True:
        # What is prepared now is not paid by the next request, which waits for a little of it.
        idle = not core.has_work and not core.prepare() and not core.tidy()
        for message in channel.receive(block=idle):
            if isinstance(message, Shutdown):
                return
            core.handle(message)
        if core.has_work:
            channel.send(core.step())
            if core.decodes_only:
                core.prepare()  # a little at a time, rather than all of it in a prompt's way
        for answer in core.answers():
            channel.send(answer)
