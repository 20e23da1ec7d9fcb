"""The engine process: `python -m cpuserve.engine.child --fd N`, where N is a connected socket.

--log-level is the log level of the parent.

The first frame that arrives is the EngineConfig. The engine then sends StageProgress messages,
and Ready (or Fatal). From then on it takes requests and sends one StepOutput per step.
Exit codes: 0 after Shutdown or when the parent has ended,
2 if the engine could not start (Fatal has the reason), 1 for any other failure.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import queue
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from cpuserve.base.children import exit_now
from cpuserve.base.errors import LIMITS, CpuserveError, StartupError, without_threads
from cpuserve.base.fault_points import fault
from cpuserve.base.log import configure, get_logger
from cpuserve.config.engine import EngineConfig
from cpuserve.engine.ipc import (
    Abort,
    Fatal,
    FrameReader,
    Inbound,
    Outbound,
    Ping,
    Pong,
    Ready,
    StageProgress,
    decode_inbound,
    encode_frame,
)

if TYPE_CHECKING:
    from cpuserve.engine.interrupt import Interrupt

log = get_logger("engine")

PR_SET_PDEATHSIG = 1
# The engine handles at most this number of messages between two steps,
# so that a flood of messages cannot stop the running streams.
MAX_DRAINED = 1024
PROGRESS_PERIOD_S = 0.05
# A full garbage collection follows this number of collections of the middle generation,
# which run after every 7,000 new objects. Full collections can wait while the engine is busy,
# because reference counts free nearly everything.
IDLE_COLLECTIONS = 4
BUSY_COLLECTIONS = 10_000

Build = Callable[[EngineConfig, Callable[[str, int, int], None], Any], Any]


class LinkFailed(CpuserveError):
    """The system refuses to send or receive a message, although the parent runs."""


class SocketChannel:
    """The engine's end of the socket pair. Sends block while the parent does not read.

    `listen` starts a reader thread. This thread sees aborts and replies to Pings while a step runs.
    The inbox has no limit, because the parent limits its queue of requests.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._reader = FrameReader()
        self._bodies: list[bytes] = []
        self._inbox: queue.SimpleQueue[Inbound | Exception] = queue.SimpleQueue()
        self._interrupt: Interrupt | None = None
        # The reader thread sends Pongs, and the engine's thread all other messages.
        self._send_lock = threading.Lock()
        self._idle = False  # whether the engine's loop waits for a message
        self._progress: Callable[[], object] | None = None
        self._seen: object = None

    def receive_config(self) -> EngineConfig:
        """Return the first message, the configuration."""
        while not self._bodies:
            self._fill()
        return msgspec.msgpack.decode(self._bodies.pop(0), type=EngineConfig)

    def listen(self) -> None:
        """Start the reader thread. Call this before the calling thread is pinned to a CPU.

        A new thread inherits the CPUs of the thread that creates it.
        """
        threading.Thread(target=self._listen, name="cpuserve-inbox", daemon=True).start()

    def watch(self, interrupt: Interrupt) -> None:
        """Report arriving aborts, requests and Shutdown to `interrupt`."""
        self._interrupt = interrupt

    def answer_pings(self, progress: Callable[[], object]) -> None:
        """From now on, reply to each Ping with progress(), which the reader thread calls."""
        self._progress = progress

    def receive(self, *, block: bool) -> list[Inbound]:
        """Return all messages; with `block`, wait for the first one. EOFError: the parent ended."""
        messages: list[Inbound] = []
        while len(messages) < MAX_DRAINED and ((block and not messages) or not self._inbox.empty()):
            self._idle = block and not messages
            message = self._inbox.get()
            self._idle = False
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
                    if isinstance(message, Ping):
                        self._pong()
                        continue
                    if self._interrupt is not None:
                        self._interrupt.see(message)
                    self._inbox.put(message)
                self._fill()
        # The front end has ended, or has sent bytes that are not a frame.
        # The engine's thread takes this error from the inbox, and `receive` raises it there.
        except Exception as error:
            self._inbox.put(error)

    def _pong(self) -> None:
        now = self._progress() if self._progress is not None else None
        self.send(Pong(self._idle or now is None or now != self._seen))
        self._seen = now

    def hung_up(self) -> bool:
        """Whether the parent has closed its end of the socket."""
        poll = select.poll()
        poll.register(self._socket, 0)
        return any(events & select.POLLHUP for _, events in poll.poll(0))

    def _fill(self) -> None:
        try:
            fault("engine.receive")
            size = self._socket.recv_into(self._reader.space)
        except OSError as error:
            raise _lost(error) from error
        if not size:
            raise EOFError
        self._bodies += self._reader.arrived(size)

    def wake(self) -> None:
        """Make `receive` return, so that the engine looks for work; from any thread."""
        self._inbox.put(Abort([]))  # an Abort without ids has no effect but wakes the engine

    def send(self, message: Outbound) -> None:
        """Send one frame. EOFError if the parent has ended; LinkFailed if the system refuses."""
        frame = encode_frame(message)
        try:
            fault("engine.send")
            with self._send_lock:
                self._socket.sendall(frame)
        except OSError as error:
            raise _lost(error) from error


def _lost(error: OSError) -> Exception:
    return EOFError() if isinstance(error, ConnectionError) else LinkFailed(str(error))


def main(argv: Sequence[str] | None = None, build: Build | None = None) -> int:
    """Run an engine on the inherited socket until it is stopped; return the exit code."""
    parser = argparse.ArgumentParser(prog="cpuserve-engine")
    parser.add_argument("--fd", type=int, required=True, help="file descriptor of the socket")
    parser.add_argument("--log-level", default="info", help="the log level of the front end")
    arguments = parser.parse_args(argv)
    _prepare_process(arguments.log_level)
    channel = SocketChannel(socket.socket(fileno=arguments.fd))
    if channel.hung_up():  # the parent may have died before prctl below could report its death
        return 0
    try:
        return _serve(channel, build)
    except EOFError:
        return 0
    except LinkFailed as error:
        # The front end takes this line as the cause when it starts the engine again.
        sys.stderr.write(f"the connection to the front end failed: {error}\n")
        return 1


def _prepare_process(log_level: str) -> None:
    """Let this process end with its parent, print stacks in a crash, and ignore SIGINT etc."""
    faulthandler.enable()
    # Ctrl-C sends these signals to the whole process group. The parent ends its streams first.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        # While the engine loads or runs a step, it does not notice that the socket was closed.
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    configure(log_level)


def _serve(channel: SocketChannel, build: Build | None) -> int:
    ready = False
    try:
        # These modules import numpy and the extension,
        # while the parent imports its own modules or resolves the configuration.
        from cpuserve.engine.build import build_engine, run_engine
        from cpuserve.engine.loop import run_loop

        config = channel.receive_config()
        channel.listen()

        def run(team: Any) -> None:
            nonlocal ready
            core = (build or build_engine)(config, _Throttle(channel), team)
            channel.answer_pings(core.progress)
            channel.send(Ready(core.info()))
            ready = True
            run_loop(core, channel, collect_at_rest())
            core.close()

        run_engine(config, run)
    except (EOFError, LinkFailed):
        raise
    except StartupError as error:
        channel.send(Fatal(str(error), startup=True))
        return 2
    except BaseException as error:
        if not ready and _refused(error):
            log.debug("the engine did not start", exc_info=True)
            channel.send(Fatal(f"{error} ({LIMITS})", startup=True))
            return 2
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}".rstrip(": ")
        channel.send(Fatal(text, startup=not ready))
        return 1
    return 0


def _refused(error: BaseException) -> bool:
    """Whether the system refused something, such as memory, and no code is wrong."""
    return without_threads(error) or isinstance(error, OSError | MemoryError)


def collect_at_rest() -> Callable[[], None]:
    """Defer full garbage collections; return a function that runs one, to call while idle.

    A full collection between steps with 96,000 cached blocks would stop all streams for 0.1 s.
    """
    # The model and the modules live until the process ends, so no later collection visits them.
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, BUSY_COLLECTIONS)

    def rest() -> None:
        if gc.get_count()[2] >= IDLE_COLLECTIONS:
            gc.collect()
            # Freeze the objects so far, so that the next collection visits only newer objects.
            gc.freeze()

    return rest


class _Throttle:
    """Sends at most twenty StageProgress messages per second, and the last one of each stage."""

    def __init__(self, channel: SocketChannel) -> None:
        self._channel = channel
        self._sent_at = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done >= total or now - self._sent_at >= PROGRESS_PERIOD_S:
            self._sent_at = now
            self._channel.send(StageProgress(stage, done, total))


if __name__ == "__main__":
    exit_now(main())
