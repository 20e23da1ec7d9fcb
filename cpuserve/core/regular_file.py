"""Files in a directory where others may write: read no pipe or device, and replace files whole."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path
from typing import BinaryIO

# Windows has none of the first two flags, and other systems have no O_BINARY.
_NO_WAIT: int = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_NO_LINK: int = getattr(os, "O_NOFOLLOW", 0)


def open_regular(path: Path, most: int, *, links: bool = False) -> BinaryIO | None:
    """Open a file for reading; None if it has more than `most` bytes or is no regular file.

    links: whether `path` may be a symbolic link to such a file.

    Raises:
      OSError: it cannot be opened, or has become something else since this looked.
    """
    found = path.stat() if links else path.lstat()
    if not stat.S_ISREG(found.st_mode) or found.st_size > most:
        return None
    # Opening a FIFO that takes its place does not wait.
    return os.fdopen(os.open(path, os.O_RDONLY | _NO_WAIT | (0 if links else _NO_LINK)), "rb")


def read_regular(path: Path, most: int, *, links: bool = False) -> bytes | None:
    """Return the content of a file; for arguments, None and errors see `open_regular`."""
    file = open_regular(path, most, links=links)
    if file is None:
        return None
    with file:
        data = file.read(most + 1)
    return data if len(data) <= most else None


def replace_file(path: Path, content: bytes) -> None:
    """Replace the content of a file at once, though other processes may replace it meanwhile.

    Raises:
      OSError: it cannot be written, and has its old content.
    """
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
