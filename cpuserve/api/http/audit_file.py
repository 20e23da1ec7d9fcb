"""AuditFile: a thread appends lines to a file, and says when they are on disk.

The lines of requests that end in one turn of the event loop, as with one step of the engine, go to
the thread together: it then takes the interpreter's lock from the loop once. Lines that wait at the
same time share one write and one fsync. The file is always a sequence of
whole lines: a line that was written only in part is cut off, after a failed write at once, and
after a crash at the next start.
"""

from __future__ import annotations

import asyncio
import os
import stat
import sys
import threading
from contextlib import suppress
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from cpuserve.base.errors import ConfigError
from cpuserve.base.fault_points import fault
from cpuserve.base.log import UNLIMITED, get_logger

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

log = get_logger("requests")

# How many seconds a line may take until it is on disk, before its request fails.
LONGEST_S = 10.0
# How often lines are tried again that could not be written.
RETRY_S = 1.0
# How many seconds the end of the server waits for the last lines.
CLOSE_S = 5.0
# The most lines that may wait; further ones are logged. With 1 KiB each they take 16 MiB.
MOST_WAITING = 16384
# A line is shorter, so the last line of a file is found in this many bytes.
_TAIL = 1 << 16
_NO_MEMORY = "there is no memory for the lines"
# The beginning of every line, which shows that a file is an audit file.
BEGINNING = b'{"time": "'


class NotAudited(Exception):
    """A line is not on disk. kept: whether it will be written later, or may have been written."""

    def __init__(self, why: str, *, kept: bool) -> None:
        super().__init__(why)
        self.why = why
        self.kept = kept


class _Pending:
    """A line that waits to be written.

    done: gets the result; None = nobody waits for it. late: ends the wait of all lines of a turn.
    """

    __slots__ = ("data", "done", "late")

    def __init__(self, data: bytes, done: asyncio.Future[str | None] | None = None) -> None:
        self.data = data
        self.done = done
        self.late: asyncio.TimerHandle | None = None


class AuditFile:
    """Appends lines to a file, which is locked against other servers, and renamed when it is full.

    trouble: why the last write failed; None = it did not. failures: how many writes have failed.
    """

    def __init__(self, path: Path, most_bytes: int, *, keeps: bool) -> None:
        """most_bytes: the size at which the file gets another name, and a new one begins.

        keeps: whether lines that cannot be written and that nobody waits for are written later.
          If false, they are logged as unaudited.

        Raises:
          ConfigError: the file cannot be used.
        """
        self.trouble: str | None = None
        self.failures = 0
        self._path = path
        self._most = most_bytes
        self._keeps = keeps
        self._owed: list[bytes] = []
        self._waiting: list[_Pending] = []
        self._turns: dict[asyncio.AbstractEventLoop, list[_Pending]] = {}
        self._ready = threading.Condition()
        self._ended = False
        self._fd, self._size, self._identity = -1, 0, (0, 0)
        try:
            self._open()
        except OSError as error:
            msg = f"--audit {path} cannot be used ({error.strerror}): choose another file"
            raise ConfigError(msg) from None
        self._thread = threading.Thread(target=self._run, name="cpuserve-audit", daemon=True)
        self._thread.start()

    async def write(self, line: bytes) -> None:
        """Append a line, and return when it is on disk.

        Raises:
          NotAudited: it cannot be written, or this takes more than LONGEST_S.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[str | None] = loop.create_future()
        waiting = _Pending(line, done)
        if not self._add(waiting, loop):
            msg = "too many lines wait for the disk"
            raise NotAudited(msg, kept=True)
        try:
            why = await done
        except BaseException:
            waiting.done = None
            raise
        if why is not None:
            raise NotAudited(why, kept=False)

    def _give_up(self, lines: Sequence[_Pending]) -> None:
        """Stop waiting for lines; they go on as lines that nobody waits for."""
        for line in lines:
            done = line.done
            if done is not None and not done.done():
                line.done = None
                self.trouble = f"the disk has not taken a line for {LONGEST_S:g} s"
                done.set_exception(NotAudited(self.trouble, kept=True))

    def put(self, line: bytes) -> None:
        """Append a line soon, without waiting for it."""
        try:
            self._add(_Pending(line), asyncio.get_running_loop())
        except RuntimeError:  # this thread has no event loop
            self._add(_Pending(line), None)

    def close(self) -> None:
        """Write the lines that wait, for at most CLOSE_S, and log those that cannot be written."""
        with self._ready:
            for loop in [*self._turns]:
                self._waiting += self._turns.pop(loop)
            self._ended = True
            self._ready.notify()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            _log_unaudited([*self._owed, *(line.data for line in self._waiting)])

    def _add(self, line: _Pending, loop: asyncio.AbstractEventLoop | None) -> bool:
        """Let a line wait for the end of this turn of the event loop; return whether it may."""
        with self._ready:
            others = sum(map(len, self._turns.values()))
            if not self._ended and len(self._waiting) + len(self._owed) + others < MOST_WAITING:
                if loop is None:
                    self._waiting.append(line)
                    self._ready.notify()
                else:
                    if loop not in self._turns:
                        self._turns[loop] = []
                        loop.call_soon(self._end_turn, loop)
                    self._turns[loop].append(line)
                return True
        _log_unaudited([line.data])
        return False

    def _end_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give the thread the lines of this turn of the event loop."""
        with self._ready:
            turn = self._turns.pop(loop, [])
            self._waiting += turn
            self._ready.notify()
        if any(line.done is not None for line in turn):
            late = loop.call_later(LONGEST_S, self._give_up, turn)
            for line in turn:
                line.late = late

    def _run(self) -> None:
        while True:
            with self._ready:
                if not self._waiting and not self._ended:
                    self._ready.wait(RETRY_S if self.trouble is not None else None)
                batch, self._waiting = self._waiting, []
                ended = self._ended
            self._commit(batch)
            if ended and not self._waiting:
                break
        _log_unaudited(self._owed)
        os.close(self._fd)

    def _commit(self, batch: Sequence[_Pending]) -> None:
        """Write the lines of `batch` after those that could not be written before."""
        if not self._owed and not batch:
            self.trouble = None if self._keeps else self.trouble  # nothing is left to try with
            return
        why = None
        try:
            self._append(b"".join([*self._owed, *(line.data for line in batch)]))
        except OSError as error:
            why = error.strerror or type(error).__name__
        except Exception as error:  # the thread goes on, because all later lines need it
            why = _NO_MEMORY if isinstance(error, MemoryError) else type(error).__name__
            log.debug("the write of audit lines failed", exc_info=True)
        if why is None:
            self._owed.clear()
        self._note(why)
        waited = [(line, line.done) for line in batch]  # a writer may stop waiting at any moment
        self._missed([line.data for line, done in waited if done is None], why)
        loops: dict[asyncio.AbstractEventLoop, list[_Pending]] = {}
        for line, done in waited:
            if done is not None:
                loops.setdefault(done.get_loop(), []).append(line)
        for loop, lines in loops.items():
            with suppress(RuntimeError):  # a loop that has ended has nobody who waits
                loop.call_soon_threadsafe(self._tell, lines, why)

    def _tell(self, lines: Sequence[_Pending], why: str | None) -> None:
        """Wake the writers of lines; runs in their event loop."""
        for line in lines:
            if line.late is not None:
                line.late.cancel()
            if line.done is None:
                if why is not None:  # its writer stopped waiting while the line was written
                    self.put(line.data)
            elif not line.done.done():
                line.done.set_result(why)

    def _missed(self, lines: list[bytes], why: str | None) -> None:
        if why is None:
            return
        if self._keeps:
            self._owed += lines
        else:
            _log_unaudited(lines)

    def _note(self, why: str | None) -> None:
        """Log when writes begin to fail, and when they succeed again."""
        before, self.trouble = self.trouble, why
        self.failures += why is not None
        if why is not None and before is None:
            log.error("the audit file %s cannot be written: %s", self._path, why, extra=UNLIMITED)
        elif why is None and before is not None:
            log.warning("the audit file %s can be written again", self._path, extra=UNLIMITED)

    def _append(self, data: bytes) -> None:
        """Append `data` and wait for the disk; after an error, no part of it is in the file."""
        if self._was_moved():
            self._open()
        self._restore()
        if self._size and self._size + len(data) > self._most:
            self._rotate()
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._fd, view[: fault("audit.write", len(view))]) :]
            fault("audit.sync")
            os.fsync(self._fd)
        except OSError:
            with suppress(OSError):
                self._restore()
            raise
        self._size += len(data)

    def _restore(self) -> None:
        """Cut off the part of a line that a failed write left; go on in a file that was emptied."""
        size = os.fstat(self._fd).st_size
        if size > self._size:
            os.ftruncate(self._fd, self._size)
        else:
            self._size = size

    def _was_moved(self) -> bool:
        """Whether the path no longer is the open file, as after logrotate."""
        try:
            found = self._path.lstat()
        except FileNotFoundError:
            return True
        return (found.st_dev, found.st_ino) != self._identity

    def _rotate(self) -> None:
        """Rename the file after the time, and begin a new one; if this fails, go on in this one."""
        name = f"{self._path.name}.{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}"
        target, number = self._path.with_name(name), 1
        while os.path.lexists(target):
            target, number = self._path.with_name(f"{name}-{number}"), number + 1
        try:
            fault("audit.rename")
            self._path.rename(target)
            try:
                self._open()
            except OSError:
                target.rename(self._path)
                raise
        except OSError as error:
            msg = "the audit file %s cannot be renamed, and goes on growing: %s"
            log.warning(msg, self._path, error.strerror)

    def _open(self) -> None:
        """Open, check and lock the file in place of the open one; cut off an incomplete last line.

        Raises:
          OSError: the file cannot be used; strerror says why.
        """
        fault("audit.open")
        fd = _opened(self._path)
        try:
            status = os.fstat(fd)
            whole = _whole_lines(fd, status.st_size)
            if whole < status.st_size:
                os.ftruncate(fd, whole)
                os.fsync(fd)
                msg = "the last line of the audit file %s was incomplete, and was cut off"
                log.warning(msg, self._path)
            _sync_folder(self._path)
        except OSError:
            os.close(fd)
            raise
        if stat.S_IMODE(status.st_mode) & 0o077:
            log.warning("other users can read the audit file %s: chmod 600 it", self._path)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._size = fd, whole
        self._identity = status.st_dev, status.st_ino


def _opened(path: Path) -> int:
    """Return the descriptor of a regular file that no other server uses."""
    if sys.platform == "win32":
        raise OSError(0, "not possible on Windows")
    import fcntl

    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise OSError(0, "it is not a regular file")  # to open a device may do something
    fd = os.open(path, flags, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(0, "it is not a regular file")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise OSError(0, "another server uses it") from None
    except OSError:
        os.close(fd)
        raise
    return fd


def _whole_lines(fd: int, size: int) -> int:
    """Return how many bytes of the file are whole lines; OSError if it is no audit file."""
    os.lseek(fd, max(0, size - _TAIL), os.SEEK_SET)
    tail = os.read(fd, _TAIL)
    lines, newline, torn = tail.rpartition(b"\n")
    last = lines.rpartition(b"\n")[2] if newline else torn
    if not (last.startswith(BEGINNING) or BEGINNING.startswith(last.rstrip(b"\0"))):
        raise OSError(0, "its last line is not of an audit file")
    return size - len(torn)


def _sync_folder(path: Path) -> None:
    """Wait until the name of a new file is on disk."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _log_unaudited(lines: Sequence[bytes]) -> None:
    """Write lines to the log that are not in the audit file."""
    for line in lines:
        log.warning("unaudited request: %s", line.decode().rstrip(), extra=UNLIMITED)
