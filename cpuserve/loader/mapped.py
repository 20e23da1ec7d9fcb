"""Weight files: read-only memory mappings that notice a change of their file, and copies."""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
from collections.abc import Generator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from cpuserve.base.errors import ModelError
from cpuserve.base.fault_points import fault
from cpuserve.loader.content import ContentCheck

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


FAULT_AROUND = 1 << 16  # at a page fault, Linux maps so many bytes around it if they are cached
PART_BYTES = 1 << 20  # a file is copied in parts of so many bytes: 0.25 ms each if cached


def regular_file(path: Path, what: str) -> os.stat_result:
    """Return the stat of `path`; ModelError unless it is a regular file. Never blocks on a FIFO."""
    try:
        found = path.stat()
    except FileNotFoundError as error:
        # The words "not found" would confuse for a dangling link, because the link exists.
        lost = " is a link to a file that does not exist" if path.is_symlink() else " not found"
        msg = f"{what} {path}{lost}"
        raise ModelError(msg) from error
    except (OSError, ValueError) as error:
        msg = f"{what} {str(path)!r} cannot be read: {_reason(error)}"
        raise ModelError(msg) from error
    if not stat.S_ISREG(found.st_mode):
        msg = f"{what} {path} is {_type_of(found.st_mode)}, not a regular file"
        raise ModelError(msg)
    return found


def check_folder(path: Path, what: str) -> None:
    """Raise ModelError unless this user may list directory `path` and open its files.

    Without this check, a file in the directory would be reported as missing,
    or the start would end with a traceback.
    """
    if not os.access(path, os.R_OK | os.X_OK):
        msg = f"{what} {path} {not_permitted()}"
        raise ModelError(msg)


def not_permitted() -> str:
    """Return the end of a message about a path that this user may not read, with the remedy."""
    return (
        f"cannot be read: Permission denied; let user {os.geteuid()}, who runs cpuserve, read it "
        "and enter the directories above it"
    )


def read_small(path: Path, what: str, max_bytes: int) -> bytes:
    """Return the content of a regular file; ModelError if it has more than `max_bytes`."""
    size = regular_file(path, what).st_size
    if size > max_bytes:
        msg = f"{what} {path} has {size} bytes; at most {max_bytes} are accepted"
        raise ModelError(msg)
    try:
        fault("weights.read")
        return path.read_bytes()
    except OSError as error:
        msg = f"{what} {path} cannot be read: {_reason(error)}"
        raise ModelError(msg) from error


def most_values(data: bytes) -> int:
    """Return a number that a JSON text has no more values than, without reading it.

    Python needs up to 150 bytes for each value, which may have two bytes in the text.
    """
    return 1 + data.count(b",") + data.count(b"[") + data.count(b"{")


class MappedFile:
    """A read-only mapping of one weight file.

    If the file shrinks, a read beyond its end kills the process (SIGBUS). Therefore call
    `check_unchanged` before each tensor. It compares size and mtime with their values at opening.
    """

    def __init__(self, path: Path, what: str) -> None:
        regular_file(path, what)
        self.path = path
        self._what = what
        self._fd = -1
        try:
            # O_NONBLOCK: open() does not block if the path has become a FIFO after the check.
            fault("weights.map")
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            self._stat = os.fstat(self._fd)
            if not stat.S_ISREG(self._stat.st_mode) or self._stat.st_size == 0:
                msg = f"{what} {path} is empty (0 bytes)"
                raise ModelError(msg)
            self.map = mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ)
        except OSError as error:
            msg = f"{what} {path} cannot be read: {_reason(error)}"
            raise ModelError(msg) from error
        self.size = self._stat.st_size

    def __del__(self) -> None:
        """Close the file descriptor; views of the file keep the mapping alive."""
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)
            self._fd = -1

    def view(self, offset: int, size: int) -> npt.NDArray[np.uint8]:
        """Return a uint8 array [size] at `offset`; its bytes are not read yet."""
        # Imported here, because the front end reads only metadata and does not need numpy.
        import numpy as np

        return np.frombuffer(self.map, np.uint8, size, offset)

    def check_content(self) -> None:
        """Raise SourceChanged if the content differs from that at the first call (ContentCheck).

        Engines that read the file while they run call this before and after they do.
        """
        self._content()

    @cached_property
    def _content(self) -> ContentCheck:
        return ContentCheck(self._fd, self.path)

    def check_unchanged(self) -> None:
        """Raise ModelError if the file's size or modification time has changed since opening."""
        now = os.fstat(self._fd)
        if (now.st_size, now.st_mtime_ns) != (self.size, self._stat.st_mtime_ns):
            msg = f"{self._what} {self.path} changed while it was being read; start cpuserve again"
            raise ModelError(msg)

    @property
    def digest(self) -> bytes:
        """Return the SHA-256 of the content, which is read for it."""
        return hashlib.sha256(self.map).digest()

    def release(self, offset: int, size: int) -> None:
        """Remove these pages from this process; the page cache keeps them for the next start.

        Up to FAULT_AROUND bytes on both sides are removed as well,
        because the kernel maps them together with these pages; a later read maps them again.
        """
        start = max(0, offset - FAULT_AROUND) & -mmap.PAGESIZE
        end = min(self.size, offset + size + FAULT_AROUND)
        self.map.madvise(mmap.MADV_DONTNEED, start, end - start)


class FileCopy:
    """The content of a weight file in memory; later changes of the file do not affect it."""

    def __init__(self, path: Path, content: bytearray, digest: bytes) -> None:
        self.path = path
        self.map = content
        self.size = len(content)
        self.digest = digest

    def view(self, offset: int, size: int) -> npt.NDArray[np.uint8]:
        """Return a uint8 array [size] at `offset`."""
        import numpy as np

        return np.frombuffer(self.map, np.uint8, size, offset)

    def check_unchanged(self) -> None:
        """Do nothing: a copy does not change."""

    def check_content(self) -> None:
        """Do nothing: a copy does not change."""

    def release(self, offset: int, size: int) -> None:
        """Do nothing: the copy is freed as a whole."""


AnyFile: TypeAlias = MappedFile | FileCopy


def copy_file(path: Path, what: str, most_bytes: int) -> Generator[None, None, FileCopy]:
    """Copy a file to memory, with a pause after each part, and return the copy.

    Raises:
        ModelError: it is not a regular file, is empty or larger than `most_bytes`, cannot be read,
            or changes while it is copied.
    """
    size = regular_file(path, what).st_size
    if not 0 < size <= most_bytes:
        msg = f"{what} {path} has {size} bytes; 1 to {most_bytes} are accepted"
        raise ModelError(msg)
    content, hashed, at = bytearray(size), hashlib.sha256(), 0
    try:
        fault("adapter.read")
        # O_NONBLOCK: open() does not block if the path has become a FIFO after the check.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", 0) as file:
            before = os.fstat(file.fileno())
            while count := file.readinto(part := memoryview(content)[at : at + PART_BYTES]):
                hashed.update(part[:count])
                at += count
                yield
            after = os.fstat(file.fileno())
    except OSError as error:
        msg = f"{what} {path} cannot be read: {_reason(error)}"
        raise ModelError(msg) from error
    if at != size or (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        msg = f"{what} {path} changed while it was being read; load it again when it is complete"
        raise ModelError(msg)
    return FileCopy(path, content, hashed.digest())


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _type_of(mode: int) -> str:
    names = {
        stat.S_IFDIR: "a directory",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFCHR: "a character device",
        stat.S_IFBLK: "a block device",
        stat.S_IFSOCK: "a socket",
    }
    return names.get(stat.S_IFMT(mode), "a special file")
