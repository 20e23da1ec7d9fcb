"""The engine's loop, which takes messages from a channel; it runs in a child process or thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from cpuserve.engine.core import EngineCore
from cpuserve.engine.interrupt import Interrupt
from cpuserve.engine.ipc import Inbound, Outbound, Shutdown


class Channel(Protocol):
    """The source of the engine's messages, and the destination of its outputs."""

    def watch(self, interrupt: Interrupt) -> None:
        """Report aborts, requests and Shutdown to `interrupt` when they arrive."""

    def receive(self, *, block: bool) -> list[Inbound]:
        """Return all messages so far; with `block`, wait for one. EOFError: the peer has ended."""

    def send(self, message: Outbound) -> None:
        """Send one message. EOFError: the peer has ended."""

    def wake(self) -> None:
        """Make `receive` return, perhaps without a message of the peer; from any thread."""


def run_loop(core: EngineCore, channel: Channel, rest: Callable[[], None] | None = None) -> None:
    """Serve until Shutdown. While idle, the loop waits in receive() and uses no CPU.

    rest: a function to call each time before the loop waits.
    """
    channel.watch(core.interrupt)
    core.wake = channel.wake
    while True:
        core.turns += 1
        # Preparing memory while idle saves time for the next request. It is done in small parts,
        # like measuring the machine, so that a new request waits only for one part.
        works = core.changing or core.has_work or core.probing
        idle = not (works or core.prepare() or core.tidy())
        if idle and rest is not None:
            rest()
        for message in channel.receive(block=idle):
            if isinstance(message, Shutdown):
                return
            core.handle(message)
        if core.has_work:
            channel.send(core.step())
            core.after_sending()
            if core.decodes_only:
                # Prepare a small part of the memory per step, so that no prompt waits for it.
                core.prepare()
        core.change_adapters()
        for reply in core.replies():
            channel.send(reply)
