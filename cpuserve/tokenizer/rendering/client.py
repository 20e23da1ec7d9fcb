"""Renders templates in processes with limits on memory and time; see process.py.

All code of a process (the server, LLM, `cpuserve chat`) shares one Renderer. The first job
starts the RenderServer process. If all forks of this process are busy, a job starts a new fork.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import select
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from threading import Lock
from typing import Any

import msgspec

from cpuserve.base.errors import LIMITS, InvalidRequest, ServiceUnavailable
from cpuserve.base.fault_points import fault
from cpuserve.base.log import get_logger
from cpuserve.limited.server import ForkServer
from cpuserve.limited.wire import receive, send
from cpuserve.tokenizer.rendering.wire import (
    READY,
    RENDERED,
    STOPPED,
    UNLIMITED,
    RenderJob,
    packed,
)

MODULE = "cpuserve.tokenizer.rendering.process"
# Limits of one render. A chat of 5 MB takes 0.1 s; other processes may use the CPU meanwhile.
MAX_CPU_S = 5.0
MAX_WALL_S = 20.0
# The limit of all renders at a start, together. Published templates take 0.1 to 0.4 s.
LEARN_S = 20.0
SILENT_S = 5.0  # seconds after MAX_WALL_S until a process that sends no reply is ended
# The limit on the memory of a job: MEMORY_BYTES, and MEMORY_PER_BYTE
# for each byte of the template's variables. Templates that copy each text a few times,
# in strings of 4 bytes per character, take 16 bytes for each byte of the variables.
MEMORY_BYTES = 64 << 20
MEMORY_PER_BYTE = 24
# The limit on the rendered text. Real templates write each text once and add about a page of text.
WRITTEN_BYTES = 4 << 20
WRITTEN_PER_BYTE = 16
START_S = 20.0  # the most seconds that the start of the process may take
MAX_IDLE = 4  # forks that are kept for further jobs
# A fork that has done a large job ends, so that its memory is free again.
LARGE_BYTES = 1 << 20
MAX_TEMPLATES = 16  # the most compiled templates in one fork

TRIES = 2
NESTED = "the messages nest too deeply for a chat template: use fewer levels"
log = get_logger("templates")


class TemplateRefused(InvalidRequest):
    """The template raised an error."""


class TemplateStopped(InvalidRequest):
    """The template reached a limit on time, on memory or on the length of its text."""


class _TimeLeft:
    """The seconds that are left for the renders of a block; see `limited_learning_time`."""

    def __init__(self) -> None:
        self.seconds = LEARN_S


_LEFT: ContextVar[_TimeLeft | None] = ContextVar("_LEFT", default=None)


@contextmanager
def limited_learning_time() -> Iterator[None]:
    """Let the renders of this thread in the block take LEARN_S together; then they are refused.

    A start renders a template some 60 times to learn its traits and its format of calls. Blocks
    in such a block share its time.
    """
    if _LEFT.get() is not None:
        yield
        return
    token = _LEFT.set(_TimeLeft())
    try:
        yield
    finally:
        _LEFT.reset(token)


def is_out_of_time() -> bool:
    """Return whether the renders of this limited_learning_time have taken all of it."""
    left = _LEFT.get()
    return left is not None and left.seconds <= 0


class RenderProcessLost(Exception):
    """A render process has ended or does not respond. timeout: the process is alive but silent."""

    def __init__(self, *, timeout: bool = False) -> None:
        super().__init__()
        self.timeout = timeout


@dataclass(slots=True, eq=False)
class Fork:
    """One process that renders: the socket to it, and the hashes of its compiled templates."""

    server: RenderServer
    sock: socket.socket
    known: set[bytes] = field(default_factory=set)

    @property
    def alive(self) -> bool:
        """Whether the process still waits for a job.

        A waiting process sends nothing, so its socket is readable only after the process has ended.
        """
        poll = select.poll()  # select() takes no descriptors above 1023, which servers have
        poll.register(self.sock, select.POLLIN)
        return not poll.poll(0)

    def ask(self, job: RenderJob) -> tuple[bytes, bytes]:
        """Send a job; return the kind and the text of the reply. Raises RenderProcessLost."""
        self.sock.settimeout(job.wall_s + SILENT_S)
        try:
            fault("templates.send")
            send(self.sock, msgspec.msgpack.encode(job))
            fault("templates.receive")
            reply = receive(self.sock)
        except TimeoutError:
            raise RenderProcessLost(timeout=True) from None
        except OSError:
            raise RenderProcessLost from None
        if reply is None:
            raise RenderProcessLost
        kind, text = reply[:1], reply[1:]
        if kind == RENDERED:  # otherwise the template may not have compiled
            self.known.add(job.template)
        return kind, text


class RenderServer:
    """The process that has loaded Jinja, and forks the processes that render."""

    def __init__(self) -> None:
        fault("templates.start")
        self._process = ForkServer(MODULE)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def fork(self) -> Fork:
        """Return a new fork; RenderProcessLost if the process does not respond or cannot fork."""
        try:
            fault("templates.connect")
            ours = self._process.connect()
        except OSError:
            raise RenderProcessLost from None
        try:
            ours.settimeout(START_S)
            word = receive(ours)
            if word in (READY, UNLIMITED):
                if word == UNLIMITED:
                    _tell_unlimited()
                return Fork(self, ours)
        except OSError:
            pass
        ours.close()
        raise RenderProcessLost

    def close(self) -> None:
        """End the process and its forks."""
        self._process.close()

    def leave(self) -> None:
        """Leave the process to the parent, in a forked child."""
        self._process.leave()


class Renderer:
    """Renders templates for any thread; the thread waits until the text is ready.

    cpu_s, wall_s: the limits of one render in seconds.
    closings: how often `close` was called.
    """

    def __init__(self, cpu_s: float = MAX_CPU_S, wall_s: float = MAX_WALL_S) -> None:
        self.cpu_s = cpu_s
        self.wall_s = wall_s
        self._lock = Lock()
        self._server: RenderServer | None = None
        self._idle: list[Fork] = []
        self.closings = 0

    @property
    def pid(self) -> int | None:
        """The process id of the RenderServer, if it has started."""
        return None if self._server is None else self._server.pid

    def check(self, source: str) -> None:
        """Compile a template. Raises TemplateRefused, TemplateStopped or ServiceUnavailable."""
        self._timed(source, None)

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """Return the text that a template writes for these variables, which have JSON types.

        Raises:
            TemplateRefused, TemplateStopped: the template or the variables are the cause.
            ServiceUnavailable: no process could be started, or the machine is too busy.
        """
        try:
            data = packed(variables)
        except RecursionError:
            raise TemplateStopped(NESTED) from None
        except (TypeError, ValueError) as error:
            msg = f"a chat template takes texts, numbers, lists and objects only: {error}"
            raise InvalidRequest(msg) from None
        return self._timed(source, data).decode("utf-8", "surrogatepass")

    def _timed(self, source: str, data: bytes | None) -> bytes:
        """Return the rendered text of `_do`, which counts for `limited_learning_time`."""
        if (left := _LEFT.get()) is None:
            return self._do(source, data)
        if left.seconds <= 0:
            why = f"its first renders take more than {LEARN_S:g} s together"
            raise _stopped(why)
        began = time.monotonic()
        try:
            return self._do(source, data)
        finally:
            left.seconds -= time.monotonic() - began

    def close(self) -> None:
        """End the processes and their jobs; a later job starts new processes."""
        with self._lock:
            self.closings += 1
            self._end()

    def begin_anew(self) -> None:
        """Forget all processes, in a forked child: it would otherwise read the parent's replies."""
        self._lock = Lock()  # another thread of the parent may have held the lock
        for fork in self._idle:
            fork.sock.close()
        server, self._server, self._idle = self._server, None, []
        if server is not None:
            server.leave()

    def _do(self, source: str, data: bytes | None) -> bytes:
        name, code = _named(source)
        size = len(data or b"") + len(code)
        memory = MEMORY_BYTES + MEMORY_PER_BYTE * size
        most = WRITTEN_BYTES + WRITTEN_PER_BYTE * size
        closings, deaths = self.closings, 0
        for _ in range(TRIES):
            fork = self._take(closings)
            new = None if name in fork.known else code
            started = time.monotonic()
            try:
                job = RenderJob(name, new, data, self.cpu_s, self.wall_s, memory, most)
                kind, text = fork.ask(job)
            except RenderProcessLost as lost:
                fork.sock.close()
                if self._is_gone(fork.server, lost):
                    continue
                took = time.monotonic() - started
                if took >= self.wall_s or lost.timeout:
                    msg = (
                        f"a chat template was not rendered within {self.wall_s:g} s, because this "
                        "machine is too busy: try again"
                    )
                    raise ServiceUnavailable(msg) from None
                late = took > 0.95 * self.cpu_s
                deaths += 1
                if deaths < TRIES and not late:
                    continue  # the system may have killed the fork, whatever the job needs
                raise _stopped(self._took_too_long() if late else _grew(memory)) from None
            except BaseException:  # Ctrl-C: nobody waits for this render
                fork.sock.close()
                raise
            self._put_back(fork, keep=kind != STOPPED and size + len(text) < LARGE_BYTES)
            return _text_of(kind, text)
        msg = "the process that renders chat templates was killed twice: try again"
        raise ServiceUnavailable(msg)

    def _took_too_long(self) -> str:
        return f"it takes more than {self.cpu_s:g} s"

    def _take(self, closings: int) -> Fork:
        """Return a process that is free. Raises ServiceUnavailable."""
        with self._lock:
            if closings != self.closings:
                msg = "the server is stopping"
                raise ServiceUnavailable(msg)
            while self._idle:
                fork = self._idle.pop()
                if fork.alive:
                    return fork
                fork.sock.close()
            return self._fork()

    def _fork(self) -> Fork:
        reason: object = "it does not respond"
        for _ in range(TRIES):
            try:
                if self._server is None:
                    atexit.unregister(self.close)
                    atexit.register(self.close)
                    self._server = RenderServer()
                return self._server.fork()
            except RenderProcessLost:
                self._end()
            except OSError as error:
                reason = error
                self._end()
        msg = f"the process for chat templates cannot be started: {reason} ({LIMITS})"
        raise ServiceUnavailable(msg)

    def _put_back(self, fork: Fork, *, keep: bool) -> None:
        with self._lock:
            room = len(self._idle) < MAX_IDLE and len(fork.known) < MAX_TEMPLATES
            if keep and room and self._server is fork.server:
                self._idle.append(fork)
                return
        fork.sock.close()

    def _is_gone(self, server: RenderServer, lost: RenderProcessLost) -> bool:
        """Return whether `server` itself has ended; if its fork was silent, end `server` now."""
        with self._lock:
            if self._server is not server:
                return True
            if lost.timeout:
                self._end()
                return False
            # A dying server ends its forks just before itself: only a reply shows that it runs.
            try:
                fork = server.fork()
            except RenderProcessLost:
                self._end()
                return True
            except OSError:  # no sockets to ask it: the next try tells whether it runs
                return True
        self._put_back(fork, keep=True)
        return False

    def _end(self) -> None:
        for fork in self._idle:
            fork.sock.close()
        self._idle.clear()
        server, self._server = self._server, None
        if server is not None:
            server.close()


def _text_of(kind: bytes, text: bytes) -> bytes:
    """Return the text of a reply, or raise the error that it reports."""
    if kind == RENDERED:
        return text
    said = text.decode("utf-8", "replace")
    raise _stopped(said) if kind == STOPPED else TemplateRefused(said)


def _grew(memory: int) -> str:
    return f"it needs more than {memory >> 20} MB of memory, or nests too deeply"


def _stopped(why: str) -> TemplateStopped:
    return TemplateStopped(f"the chat template was stopped: {why}; {WHAT_TO_DO}")


@lru_cache(maxsize=64)
def _named(source: str) -> tuple[bytes, bytes]:
    """Return the name of a template (its SHA-256), and its text as bytes."""
    code = source.encode("utf-8", "surrogatepass")
    return hashlib.sha256(code).digest(), code


@lru_cache(maxsize=1)
def _tell_unlimited() -> None:
    log.warning(
        "this system cannot limit the memory of a process: chat templates render without such a "
        "limit, so load only models that you trust"
    )


WHAT_TO_DO = (
    "send shorter messages and tools with fewer levels, or start the server with another template "
    "(--chat-template FILE)"
)
RENDERER = Renderer()
os.register_at_fork(after_in_child=RENDERER.begin_anew)
