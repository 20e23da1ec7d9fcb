"""Decodes files in processes with limits on memory and time; see process.py.

All code of a process (the server, LLM) shares one Decoder. The first job starts its process.
"""

from __future__ import annotations

import atexit
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from threading import Lock
from typing import TypeVar

import msgspec

from cpuserve.base.errors import LIMITS, InvalidRequest, ServiceUnavailable
from cpuserve.base.fault_points import fault
from cpuserve.limited.server import ForkServer
from cpuserve.limited.wire import receive, send
from cpuserve.media.decoding.formats import MOST_PIXELS, is_document
from cpuserve.media.decoding.wire import (
    DECODED,
    OPENED,
    READY,
    STOPPED,
    USED_BYTES,
    DecodedFile,
    DecodeJob,
    PackedFamily,
)
from cpuserve.media.pictures.families.base import Family

T = TypeVar("T")

MODULE = "cpuserve.media.decoding.process"
# Limits of one file. A picture of 64 million pixels takes about 2 s; other processes may use
# the CPU meanwhile. Each page of a document may take more.
MAX_CPU_S, PAGE_CPU_S = 5.0, 1.0
MAX_WALL_S, PAGE_WALL_S = 20.0, 4.0
TEXT_CPU_S, TEXT_WALL_S = 5.0, 20.0  # more for a text: 2,000 pages of a PDF take 2 s
SILENT_S = 5.0  # seconds after the limit until a process that sends no reply is ended
# The most pixels of a picture: 8192 x 8192. A page at 600 dpi has half of them.
MAX_PIXELS = 1 << 26
# Pillow has 4 bytes for a pixel, and up to four copies of a picture while it is converted.
MEMORY_BYTES = (256 << 20) + 16 * MAX_PIXELS
START_S = 20.0  # the most seconds that the start of the process may take
# A process that has ended is noticed at the first try, or at the second; the third has a new one.
TRIES = 3
_LATE = 0.95  # a fork that ends after this part of its time has reached the limit
_DIGITS = 12  # of the number of pixels
NEEDED = "PIL"


class PictureStopped(InvalidRequest):
    """Decoding a file reached a limit, or ended the process."""


@dataclass(frozen=True, slots=True)
class Pictures:
    """The pictures of one file, and the patches of all of them, one after another."""

    file: DecodedFile
    patches: bytes

    def of(self, index: int, patch_bytes: int) -> bytes:
        """Return the patches of one picture."""
        sizes = [picture.layout.num_patches * patch_bytes for picture in self.file.pictures]
        begin = sum(sizes[:index])
        return self.patches[begin : begin + sizes[index]]


def is_installed() -> bool:
    """Return whether the library that decodes pictures is installed (cpuserve[images])."""
    return find_spec(NEEDED) is not None


class Decoder:
    """Decodes files for any thread; the thread waits until the pictures are ready.

    cpu_s, wall_s, memory_bytes: the limits of one picture.
    closings: how often `close` was called.
    """

    def __init__(self, cpu_s: float = MAX_CPU_S, wall_s: float = MAX_WALL_S) -> None:
        self.cpu_s = cpu_s
        self.wall_s = wall_s
        self.memory_bytes = MEMORY_BYTES
        self.max_pixels = MAX_PIXELS
        self.closings = 0
        self._lock = Lock()
        self._server: ForkServer | None = None

    @property
    def pid(self) -> int | None:
        """The process id of the process that forks, if it has started."""
        return None if self._server is None else self._server.pid

    def decode(
        self,
        data: bytes,
        family: Family,
        *,
        document: bool,
        most_pages: int,
        measures: bool,
        left: int = MOST_PIXELS,
        page: int = -1,
        opened: Callable[[int], object] | None = None,
        charge_seconds: Callable[[float], object] | None = None,
    ) -> Pictures:
        """Return the pictures of a file.

        document: whether the file may be a document with at most most_pages pages.
        measures: find only the layouts; there are no patches.
        left: how many pixels a picture may have; 0 or more.
        page: draw only this page of a document; -1 = all.
        opened: is called with the number of pixels before they are decoded, for each attempt.
        charge_seconds: is called with the CPU seconds of an attempt, whatever the header says.

        Raises:
            PictureStopped: decoding reached a limit, or ended the process.
            InvalidRequest: the file cannot be decoded; the message has no subject.
            ServiceUnavailable: no process could be started, or the machine is too busy.
        """
        pages = most_pages if document and page < 0 and not measures and is_document(data) else 0
        job = DecodeJob(
            PackedFamily.of(family),
            measures,
            document,
            page,
            most_pages,
            self.max_pixels,
            left,
            self.cpu_s + PAGE_CPU_S * pages,
            self.wall_s + PAGE_WALL_S * pages,
            self.memory_bytes,
        )

        def ask(sock: socket.socket) -> Pictures:
            decoded = self._ask(sock, job, data, opened, charge_seconds)
            return _pictures(sock, decoded, None if measures else family.patch_bytes)

        return self._run(job, ask, charge_seconds)

    def text(self, data: bytes, charge_seconds: Callable[[float], object] | None = None) -> str:
        """Return the text of a PDF or Word document (texts.py).

        charge_seconds, and what is raised: as in `decode`.
        """
        limits = self.cpu_s + TEXT_CPU_S, self.wall_s + TEXT_WALL_S, self.memory_bytes
        job = DecodeJob(None, False, True, -1, 0, 0, 0, *limits)

        def ask(sock: socket.socket) -> str:
            return self._ask(sock, job, data, None, charge_seconds).decode("utf-8", "replace")

        return self._run(job, ask, charge_seconds)

    def _run(
        self,
        job: DecodeJob,
        ask: Callable[[socket.socket], T],
        charge_seconds: Callable[[float], object] | None,
    ) -> T:
        """Return what `ask` gets from a fork that is ready, at the first or the second try."""
        closings = self.closings
        for is_last in (False, True):
            with self._connect(closings) as sock:
                sock.settimeout(job.wall_s + SILENT_S)
                start_s = time.monotonic()
                try:
                    return ask(sock)
                except TimeoutError:
                    self._end()
                    _tell(charge_seconds, job.cpu_s)
                    raise _too_busy(job.wall_s) from None
                except OSError:  # the fork has ended without a reply
                    took = time.monotonic() - start_s
                    _tell(charge_seconds, min(took, job.cpu_s))
                    if took >= job.wall_s:
                        raise _too_busy(job.wall_s) from None
                    if took > _LATE * job.cpu_s:
                        raise self._late() from None
            if is_last:  # the system may have killed the first fork, whatever the file needs
                break
        msg = "the process that read it has ended twice"
        raise _stopped(msg)

    def close(self) -> None:
        """End the processes and their jobs; a later job starts new processes."""
        with self._lock:
            self.closings += 1
        self._end()

    def begin_anew(self) -> None:
        """Forget the process, in a forked child."""
        self._lock = Lock()
        server, self._server = self._server, None
        if server is not None:
            server.leave()

    def _ask(
        self,
        sock: socket.socket,
        job: DecodeJob,
        data: bytes,
        opened: Callable[[int], object] | None,
        charge_seconds: Callable[[float], object] | None,
    ) -> bytes:
        """Send a job and return its result. Raises OSError if the process has ended."""
        fault("pictures.send")
        send(sock, msgspec.msgpack.encode(job))
        send(sock, data)
        fault("pictures.receive")
        kind, text = _reply(sock)
        if kind == OPENED:
            if opened is not None:
                opened(min(int(text[:_DIGITS]), MOST_PIXELS))
            fault("pictures.receive")
            kind, text = _reply(sock)
        _tell(charge_seconds, int.from_bytes(text[:USED_BYTES], "little") / 1e6)
        text = text[USED_BYTES:]
        if kind == STOPPED:
            raise _stopped(text.decode())
        if kind != DECODED:
            raise InvalidRequest(text.decode("utf-8", "replace"))
        return text

    def _connect(self, closings: int) -> socket.socket:
        """Return a socket to a new fork that is ready. Raises ServiceUnavailable."""
        reason: object = "it does not respond"
        for _ in range(TRIES):
            if closings != self.closings:
                msg = "the server is stopping"
                raise ServiceUnavailable(msg)
            try:
                sock = self._server_now().connect()
            except OSError as error:  # the process cannot be started, or has ended
                reason = error
                self._end()
                continue
            try:
                sock.settimeout(START_S)
                if receive(sock) == READY:
                    return sock
            except TimeoutError:
                self._end()
            except OSError:
                pass
            sock.close()
        try:  # otherwise a process that ended at the last try is there until the next job
            self._server_now().connect().close()
        except OSError:
            self._end()
        msg = f"the process for pictures cannot be started: {reason} ({LIMITS})"
        raise ServiceUnavailable(msg)

    def _server_now(self) -> ForkServer:
        """Return the process that forks, started if necessary. Raises OSError."""
        with self._lock:
            if self._server is None:
                atexit.unregister(self.close)
                atexit.register(self.close)
                fault("pictures.start")
                self._server = ForkServer(MODULE)
            server = self._server
        fault("pictures.connect")
        return server

    def _end(self) -> None:
        with self._lock:
            server, self._server = self._server, None
        if server is not None:
            server.close()

    def _late(self) -> PictureStopped:
        return _stopped(f"it takes more than {self.cpu_s:g} s")


def _too_busy(seconds: float) -> ServiceUnavailable:
    """Return the error for a file that used less CPU time than it may, but took too long."""
    return ServiceUnavailable(
        f"was not decoded within {seconds:g} s, because this machine is too busy: try again"
    )


def _tell(charge_seconds: Callable[[float], object] | None, seconds: float) -> None:
    if charge_seconds is not None:
        charge_seconds(seconds)


def _reply(sock: socket.socket) -> tuple[bytes, bytes]:
    """Return the kind of the next reply, and the rest. Raises OSError if the process has ended."""
    reply = receive(sock)
    if reply is None:
        raise ConnectionResetError
    return reply[:1], reply[1:]


def _pictures(sock: socket.socket, result: bytes, patch_bytes: int | None) -> Pictures:
    """Return the pictures of a reply; patch_bytes: None = without patches."""
    decoded = msgspec.msgpack.decode(result, type=DecodedFile)
    if patch_bytes is None:
        return Pictures(decoded, b"")
    return Pictures(decoded, _received(sock, decoded, patch_bytes))


def _received(sock: socket.socket, decoded: DecodedFile, patch_bytes: int) -> bytes:
    """Return the patches, which the process sends as the descriptor of a file."""
    size = sum(picture.layout.num_patches for picture in decoded.pictures) * patch_bytes
    _, descriptors, _, _ = socket.recv_fds(sock, 1, 1)
    if not descriptors:
        raise ConnectionResetError
    try:
        parts, num_read = [], 0
        while num_read < size:
            part = os.pread(descriptors[0], fault("pictures.read", size - num_read), num_read)
            if not part:
                raise ConnectionResetError
            parts.append(part)
            num_read += len(part)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _stopped(reason: str) -> PictureStopped:
    return PictureStopped(f"was not decoded: {reason}. Send a smaller picture, as PNG or JPEG")


DECODER = Decoder()
os.register_at_fork(after_in_child=DECODER.begin_anew)
