"""ProcessClient: an engine in a child process, connected by a socket pair."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack, suppress
from typing import IO, Any, cast

from cpuserve.base.background import keep
from cpuserve.base.errors import LIMITS, EngineDead, StartupError
from cpuserve.base.fault_points import fault
from cpuserve.base.log import get_logger, relay
from cpuserve.config.engine import EngineConfig
from cpuserve.core.admission import Limits
from cpuserve.engine.client import PayloadOf, ReplicaStatus
from cpuserve.engine.ipc import (
    AddRequest,
    Ask,
    Fatal,
    FrameError,
    FrameReader,
    Inbound,
    Outbound,
    Output,
    Ping,
    Pong,
    Ready,
    Reply,
    Shutdown,
    StageProgress,
    Stats,
    StepOutput,
    decode_outbound,
    encode_frame,
)
from cpuserve.engine.launch import CHILD_MODULE, SpareProcess, start_process
from cpuserve.engine.liveness import HangLimits, LastWords, Liveness
from cpuserve.engine.streams import Admission, Streams, limits_of

log = get_logger("engine")

EXIT_WAIT_S = 5.0
KILL_WAIT_S = 2.0  # a process in a call to a disk that does not respond ends only after the call
POLL_S = 0.01
_CAUSES = {
    "SIGKILL": "the system does that when memory runs out",
    "SIGBUS": "the system does that when a file that is mapped was cut, such as packed weights",
}
# Signals for a fault in the process itself, which its last lines of output may describe.
# Lines before another signal, such as SIGKILL, are not related to that signal.
_FAULTS = ("SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS", "SIGTRAP")


class DiedAtStart(StartupError):
    """The engine's process ended during its start without an error message."""


class ProcessClient:
    """EngineClient of an engine in a child process. `spawn` creates it, without an event loop."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        sock: socket.socket,
        on_progress: Callable[[StageProgress], None] | None = None,
        limits: HangLimits | None = None,
    ) -> None:
        self.info: dict[str, object] = {}
        self.stats = Stats()
        self.progress: StageProgress | None = None
        self.on_step: Callable[[Stats], None] | None = None
        self._on_progress = on_progress
        self._process = process
        self._socket = sock
        self._stderr = _StderrRelay(process)
        self._streams = Streams()
        self._admission = Admission()
        self._link: _Link | None = None
        self._ready: asyncio.Future[None] | None = None
        self._replies: dict[int, asyncio.Future[dict[str, object]]] = {}
        self._num_asked = 0
        self._fatal: Fatal | None = None
        self._dead: str | None = None
        self._limits: Limits | None = None
        self._burial: asyncio.Task[None] | None = None
        self._hang_limits = limits or HangLimits()
        self._liveness = Liveness(self._hang_limits)
        self._ticking: asyncio.TimerHandle | None = None
        self._ended_because = ""
        self._killed_at = self._ended_at = 0.0
        self._closing = False
        self._ended = asyncio.Event()

    @classmethod
    def spawn(
        cls,
        config: EngineConfig,
        *,
        on_progress: Callable[[StageProgress], None] | None = None,
        module: str = CHILD_MODULE,
        limits: HangLimits | None = None,
        spare: SpareProcess | None = None,
    ) -> ProcessClient:
        """Start the engine and return immediately; wait_ready waits until it serves.

        spare: may have a process that was started in advance; this process is then used.

        Raises:
            StartupError: the system refuses another process, thread, file or more memory.
        """
        with ExitStack() as undo:
            try:
                started = (spare and spare.take(module)) or start_process(module)
                undo.callback(started.kill)
                fault("engine.configure")
                started.sock.sendall(encode_frame(config))
                client = cls(started.process, started.sock, on_progress, limits)
            except (OSError, RuntimeError) as error:  # RuntimeError: a thread did not start
                msg = f"the engine's process cannot be started: {error} ({LIMITS})"
                raise StartupError(msg) from error
            undo.pop_all()
        return client

    # --- EngineClient -------------------------------------------------------------------------

    async def wait_ready(self) -> None:
        """Wait until the engine serves; raise its StartupError if it cannot start."""
        if self._ready is None:
            loop = asyncio.get_running_loop()
            self._ready = loop.create_future()
            self._socket.setblocking(False)
            _, self._link = await loop.create_connection(lambda: _Link(self), sock=self._socket)
        await asyncio.shield(self._ready)

    def generate(
        self,
        request: AddRequest,
        *,
        timeout_s: float | None = None,
        payload_of: PayloadOf | None = None,
    ) -> AsyncGenerator[Output, None]:
        """Generate one sequence; closing the iterator aborts it.

        Raises:
            InvalidRequest: the request exceeds a limit of the engine.
            EngineDead: while iterating, if the engine ends.
            DeadlineExceeded: while iterating, timeout_s seconds after the start.
        """
        link, limits = self._connected()
        message = self._admission.admit(request, limits)
        return self._streams.run(message, self._post, link.wait_writable, timeout_s, payload_of)

    async def ask(self, what: str, **details: Any) -> dict[str, object]:
        """Return a report of the engine, or the result of a change (`Ask`)."""
        self._connected()
        self._num_asked += 1
        number = self._num_asked
        future: asyncio.Future[dict[str, object]] = asyncio.get_running_loop().create_future()
        self._replies[number] = future
        try:
            self._post(Ask(number, what, details))
            return await future
        finally:
            del self._replies[number]

    @property
    def alive(self) -> bool:
        """Whether the engine is ready and has not died."""
        return bool(self.info) and not self._closing and self._dead is None and self._burial is None

    @property
    def ended(self) -> bool:
        """Whether the engine was ready and has died, or was closed."""
        return bool(self.info) and not self.alive

    @property
    def hung(self) -> bool:
        """Whether the engine has work but does not respond; it may recover, or be killed later."""
        return self.alive and self._liveness.hung

    @property
    def trouble(self) -> str:
        """Why the engine does not serve now."""
        if self._dead is not None:
            return self._dead
        if self._burial is not None:  # its last words may still come
            return "the engine ends" if self._process.poll() is None else self._how_it_ended()
        if self._liveness.hung:
            return f"the engine {self._liveness.symptom}"
        return "the engine is not ready"

    @property
    def replicas(self) -> Sequence[ReplicaStatus]:
        """Empty, because this client does not restart its engine."""
        return ()

    async def wait_ended(self) -> str:
        """Wait until the engine has ended; return a text that says how it ended."""
        await self._ended.wait()
        return self._dead or ""

    @property
    def pid(self) -> int:
        """The engine's process id."""
        return self._process.pid

    async def close(self) -> None:
        """Stop the engine, kill it if it does not end in time, and reap it if it ends then."""
        if self._closing:
            return
        self._closing = True
        if self.info and self._dead is None:
            self._post(Shutdown())
        else:
            self._process.kill()
        await self._wait_exit()
        if self._process.poll() is None:
            log.warning(
                "the engine (process %d) was killed and has not ended: the system still frees its "
                "memory, or waits for a disk that does not respond",
                self.pid,
            )
        if self._link is not None:
            self._link.close()
        self._fail("the server is shutting down")
        if self._burial is not None:
            await self._burial
        self._release()

    def kill(self) -> None:
        """Kill the engine and reap it if it ends; for callers without an event loop."""
        self._closing = True
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_WAIT_S + KILL_WAIT_S)
        self._release()

    # --- the link's callbacks -----------------------------------------------------------------

    def on_message(self, message: Outbound) -> None:
        """Handle one message from the engine."""
        if isinstance(message, Pong):
            self._liveness.pong(message.advanced)
            return
        self._liveness.hear()
        if isinstance(message, StepOutput):
            self.stats = message.stats
            if self.on_step is not None:
                self.on_step(message.stats)
            self._streams.dispatch(message.outputs)
        elif isinstance(message, StageProgress):
            self.progress = message
            if self._on_progress is not None:
                self._on_progress(message)
        elif isinstance(message, Ready):
            self.info, self._limits = message.info, limits_of(message.info)
            if self._ready is not None and not self._ready.done():
                self._ready.set_result(None)
        elif isinstance(message, Reply):
            asked = self._replies.get(message.id)
            if asked is not None and not asked.done():
                asked.set_result(message.value)
        else:
            self._fatal = message

    def on_lost(self) -> None:
        """After the engine has closed its socket, wait for its end, then fail all waiting calls."""
        if not self._closing and self._burial is None:
            self._burial = keep("ending requests of a dead engine", self._bury)

    # --- hang detection -----------------------------------------------------------------------

    def _watch(self) -> None:
        """Schedule the next check that the engine still responds while it has work."""
        if self._ticking is None and self.alive:
            loop = asyncio.get_running_loop()
            delay = self._hang_limits.tick_s
            self._ticking = loop.call_later(delay, self._tick, loop.time())

    def _tick(self, before: float) -> None:
        self._ticking = None
        if not self.alive:
            return
        liveness, hung = self._liveness, self._liveness.hung
        has_work = bool(self._replies) or self._streams.waiting
        elapsed = asyncio.get_running_loop().time() - before
        if liveness.tick(elapsed, has_work) and self._link is not None:
            self._link.send(Ping())
        if liveness.lost:
            self._kill_hung()
        elif liveness.hung and not hung:
            log.warning(
                "the engine (process %d) %s: it gets no new requests until it responds again, and "
                "is killed after %g s without a response",
                self.pid,
                liveness.symptom,
                self._hang_limits.end_s,
            )
        elif hung and not liveness.hung:
            log.warning("the engine (process %d) responds again", self.pid)
        if liveness.open(has_work):
            self._watch()

    def _kill_hung(self) -> None:
        """Kill the engine; fail its calls later than KILL_WAIT_S seconds after the first kill.

        A process in a call to a disk that does not respond goes on to hold its connection.
        """
        now = time.monotonic()
        if not self._ended_because:
            self._ended_because, self._killed_at = self._liveness.symptom, now
        self._process.kill()
        if now > self._killed_at + KILL_WAIT_S:
            self._reject_calls(f"{self._how_it_ended()}, but has not ended yet")

    async def _bury(self) -> None:
        await self._wait_exit()
        await asyncio.to_thread(self._stderr.join)
        self._fail(self._how_it_ended())

    def _fail(self, how: str) -> None:
        """Fail all waiting streams and Ask messages; how: a text that says how the engine ended."""
        if self._dead is not None:
            return
        self._dead = how
        self._ended.set()
        self._reject_calls(how)
        if self._ready is not None:
            _reject(self._ready, self._start_error(how))

    def _reject_calls(self, how: str) -> None:
        self._streams.fail(how)
        for future in self._replies.values():
            _reject(future, EngineDead(how))

    def _start_error(self, how: str) -> StartupError:
        if self._fatal is not None and self._fatal.startup:
            return StartupError(self._fatal.message)
        return DiedAtStart(f"the engine did not start: {how}")

    def _how_it_ended(self) -> str:
        """Return a text that says how the engine ended."""
        if self._ended_because:
            return f"the engine {self._ended_because}, and was killed"
        code = self._process.poll() or 0
        how, last = f"ended with exit code {code}", self._stderr.words.at(self._ended_at)
        if code < 0:
            name = _signal_name(-code)
            how = f"was killed by {name}"
            if name in _CAUSES:
                how += f" ({_CAUSES[name]})"
            if name not in _FAULTS:
                last = ""
        if self._fatal is not None:
            last = self._fatal.message
        return f"the engine {how}" + (f": {last}" if last else "")

    # --- helpers of the methods above ---------------------------------------------------------

    def _connected(self) -> tuple[_Link, Limits]:
        if self._dead is not None or self._link is None or self._limits is None:
            raise EngineDead(self.trouble)
        return self._link, self._limits

    def _post(self, message: Inbound) -> None:
        if self._link is not None:
            self._link.send(message)
            self._watch()

    async def _wait_exit(self) -> None:
        """Reap the process; kill it after EXIT_WAIT_S seconds. `close` waits KILL_WAIT_S more."""
        deadline = time.monotonic() + EXIT_WAIT_S
        while self._process.poll() is None:
            if time.monotonic() > deadline:
                self._ended_because = self._ended_because or "closed its connection"
                self._process.kill()
            if self._closing and time.monotonic() > deadline + KILL_WAIT_S:
                break
            await asyncio.sleep(POLL_S)
        self._ended_at = time.monotonic()

    def _release(self) -> None:
        self._socket.close()
        self._stderr.join()


class _Link(asyncio.BufferedProtocol):
    """The parent's end of the socket pair."""

    def __init__(self, client: ProcessClient) -> None:
        self._client = client
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._writable = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # The class is not checked: under Ray the event loop is uvloop, which has another class.
        self._transport = cast("asyncio.Transport", transport)
        self._writable.set()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        return self._reader.space

    def buffer_updated(self, nbytes: int) -> None:
        fault("front_end.receive")
        try:
            for body in self._reader.arrived(nbytes):
                self._client.on_message(decode_outbound(body))
        except FrameError:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._writable.set()
        self._client.on_lost()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    async def wait_writable(self) -> None:
        """Return when the transport's buffer has space again, or the connection is lost."""
        # All waiting tasks wake together, and the first one may fill the buffer again.
        while not self._writable.is_set():
            await self._writable.wait()

    def send(self, message: Inbound) -> None:
        """Queue one message. Before a request, await wait_writable, which limits the buffer."""
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.write(encode_frame(message))

    def close(self) -> None:
        """Close the connection without sending the buffer."""
        if self._transport is not None:
            self._transport.abort()


class _StderrRelay:
    """Copies the child's stderr to this process's stderr, and keeps its last words."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        self.words = LastWords()
        # A thread reads stderr, because the child writes before the event loop exists.
        self._thread = threading.Thread(
            target=self._run, args=(process.stderr,), name="cpuserve-engine-stderr", daemon=True
        )
        self._thread.start()

    def _run(self, stream: IO[bytes]) -> None:
        with stream:
            for raw in stream:
                line = raw.decode(errors="replace")
                self.words.hear(line, time.monotonic())
                relay(line, "engine")

    def join(self) -> None:
        """Wait at most a second for the remaining lines, as a grandchild may keep the pipe open."""
        self._thread.join(1.0)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _reject(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # mark it as retrieved, or asyncio logs a warning if nobody waits
