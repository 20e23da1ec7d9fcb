"""A regular file mapped read-only, that notices when it changes under the mapping."""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from cpuserve.errors import ModelError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


FAULT_AROUND = 1 << 16  # Linux maps so many bytes around a fault of a file that is in memory


def regular_file(path: Path, what: str) -> os.stat_result:
    """Its stat; ModelError unless `path` is a regular file (never blocks on a FIFO or device)."""
    try:
        found = path.stat()
    except FileNotFoundError as error:
        # A dangling link is there but leads nowhere; say so.
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


def read_small(path: Path, what: str, max_bytes: int) -> bytes:
    """The whole file; ModelError if it is no regular file or larger than `max_bytes`."""
    size = regular_file(path, what).st_size
    if size > max_bytes:
        msg = f"{what} {path} has {size} bytes; at most {max_bytes} are accepted"
        raise ModelError(msg)
    try:
        return path.read_bytes()
    except OSError as error:
        msg = f"{what} {path} cannot be read: {_reason(error)}"
        raise ModelError(msg) from error


class MappedFile:
    """Read-only mapping of one weight file.

    `check_unchanged` compares size and mtime with those at opening: reading a mapping beyond the
    end of a file that shrank would kill the process (SIGBUS), so it is asked before each tensor.
    """

    def __init__(self, path: Path, what: str) -> None:
        regular_file(path, what)
        self.path = path
        self._what = what
        self._fd = -1
        try:
            # O_NONBLOCK: should the path become a FIFO after the check, open() returns at once.
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
        """Close the descriptor; the mapping itself lives as long as a view of it."""
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)
            self._fd = -1

    def view(self, offset: int, size: int) -> npt.NDArray[np.uint8]:
        """uint8 [size] at `offset`, not read yet."""
        # Imported here: the front end reads metadata only and does without numpy.
        import numpy as np

        return np.frombuffer(self.map, np.uint8, size, offset)

    def check_unchanged(self) -> None:
        """ModelError if the file's size or modification time is not what it was at opening."""
        now = os.fstat(self._fd)
        if (now.st_size, now.st_mtime_ns) != (self.size, self._stat.st_mtime_ns):
            msg = f"{self._what} {self.path} changed while it was being read; start again"
            raise ModelError(msg)

    def release(self, offset: int, size: int) -> None:
        """Drop these pages from this process; the page cache keeps them for the next start.

        So go their neighbours, which the kernel mapped along with them: they come back when read.
        """
        start = max(0, offset - FAULT_AROUND) & -mmap.PAGESIZE
        end = min(self.size, offset + size + FAULT_AROUND)
        self.map.madvise(mmap.MADV_DONTNEED, start, end - start)


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
