"""The engine process: `python -m cpuserve.engine.child --fd N`, where N is a connected socket.

The first frame is the EngineConfig; then Progress..., Ready (or Fatal) and one StepOutput a step go
out, requests come in. Exit codes: 0 after Shutdown or when the parent is gone, 2 when it could not
start (the parent got the line), 1 for anything else.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from cpuserve.config.engine import EngineConfig
from cpuserve.engine.ipc import (
    Fatal,
    FrameReader,
    Inbound,
    Outbound,
    Progress,
    Ready,
    decode_inbound,
    encode_frame,
)
from cpuserve.errors import LIMITS, StartupError, without_threads
from cpuserve.log import configure

if TYPE_CHECKING:
    from cpuserve.engine.interrupt import Interrupt

PR_SET_PDEATHSIG = 1
RECEIVE_BYTES = 1 << 16
MAX_DRAINED = 1024  # messages taken between two steps, so that a flood cannot stop the streams
PROGRESS_PERIOD_S = 0.05

Build = Callable[[EngineConfig, Callable[[str, int, int], None], Any], Any]


class SocketChannel:
    """The engine's end of the socket pair. Blocking sends: a parent that does not read stops it.

    `listen` starts a thread that reads, so that an abort is seen while a step runs. What waits in
    the inbox is bounded by the parent's own queue.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._reader = FrameReader()
        self._bodies: list[bytes] = []
        self._inbox: queue.SimpleQueue[Inbound | Exception] = queue.SimpleQueue()
        self._interrupt: Interrupt | None = None

    def receive_config(self) -> EngineConfig:
        """The first message."""
        while not self._bodies:
            self._fill()
        return msgspec.msgpack.decode(self._bodies.pop(0), type=EngineConfig)

    def listen(self) -> None:
        """Read from now on. Before threads are pinned: a new thread inherits the CPUs."""
        threading.Thread(target=self._listen, name="cpuserve-inbox", daemon=True).start()

    def watch(self, interrupt: Interrupt) -> None:
        """Tell `interrupt` of aborts and Shutdown when they arrive."""
        self._interrupt = interrupt

    def receive(self, *, block: bool) -> list[Inbound]:
        """Messages that have arrived; with `block`, at least one. EOFError at the end."""
        messages: list[Inbound] = []
        while len(messages) < MAX_DRAINED and ((block and not messages) or not self._inbox.empty()):
            message = self._inbox.get()
            if isinstance(message, Exception):
                raise message
            messages.append(message)
        return messages

    def _listen(self) -> None:
        try:
            while True:
                bodies, self._bodies = self._bodies, []
                for body in bodies:
                    message = decode_inbound(body)
                    if self._interrupt is not None:
                        self._interrupt.see(message)
                    self._inbox.put(message)
                self._fill()
        except Exception as error:  # EOFError, or a frame that is none: the engine's thread ends
            self._inbox.put(error)

    def hung_up(self) -> bool:
        """The parent's end is closed."""
        poll = select.poll()
        poll.register(self._socket, 0)
        return any(events & select.POLLHUP for _, events in poll.poll(0))

    def _fill(self) -> None:
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except ConnectionError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        self._bodies += self._reader.feed(data)

    def send(self, message: Outbound) -> None:
        """Send one frame. EOFError if the parent is gone."""
        try:
            self._socket.sendall(encode_frame(message))
        except ConnectionError as error:
            raise EOFError from error


def main(argv: Sequence[str] | None = None, build: Build | None = None) -> int:
    """Run an engine on the inherited socket until told to stop; returns the exit code."""
    parser = argparse.ArgumentParser(prog="cpuserve-engine")
    parser.add_argument("--fd", type=int, required=True)
    arguments = parser.parse_args(argv)
    _prepare_process()
    channel = SocketChannel(socket.socket(fileno=arguments.fd))
    if channel.hung_up():  # the parent may have died before its death was a signal
        return 0
    try:
        return _serve(channel, build)
    except EOFError:
        return 0


def _prepare_process() -> None:
    """Die with the parent, show where a crash was, leave Ctrl-C and SIGTERM to the parent."""
    faulthandler.enable()
    # Both reach the whole process group or service; the parent ends streams first, then this.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        # An EOF is not seen in the middle of a step or of loading.
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    configure()


def _serve(channel: SocketChannel, build: Build | None) -> int:
    ready = False
    try:
        config = channel.receive_config()
        channel.listen()
        # numpy and the extension: imported while the parent imports its own.
        from cpuserve.engine.core import build_engine, run_engine
        from cpuserve.engine.loop import run_loop

        def run(team: Any) -> None:
            nonlocal ready
            core = (build or build_engine)(config, _Throttle(channel), team)
            channel.send(Ready(core.info()))
            ready = True
            run_loop(core, channel)
            core.close()

        run_engine(config, run)
    except EOFError:
        raise
    except StartupError as error:
        channel.send(Fatal(str(error), startup=True))
        return 2
    except BaseException as error:
        if not ready and without_threads(error):
            channel.send(Fatal(f"{error} ({LIMITS})", startup=True))
            return 2
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}".rstrip(": ")
        channel.send(Fatal(text, startup=not ready))
        return 1
    return 0


class _Throttle:
    """Progress messages, twenty a second at most, and the last one of each stage."""

    def __init__(self, channel: SocketChannel) -> None:
        self._channel = channel
        self._sent_at = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done >= total or now - self._sent_at >= PROGRESS_PERIOD_S:
            self._sent_at = now
            self._channel.send(Progress(stage, done, total))


def exit_now(code: int) -> None:
    """End the process without tearing the interpreter down: the system frees memory faster."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or nobody reads it
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_now(main())
