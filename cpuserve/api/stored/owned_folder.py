"""A folder that one server owns: its lock, and records in it that are replaced as a whole."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from cpuserve.base.errors import ConfigError
from cpuserve.base.fault_points import fault
from cpuserve.base.log import get_logger
from cpuserve.core.regular_file import read_regular

log = get_logger("serve")
S = TypeVar("S", bound=msgspec.Struct)
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_RECORD_BYTES = 64 << 20


class OwnedFolder:
    """A folder with parts (folders in it), which no other server uses until `close`."""

    def __init__(self, option: str, folder: Path, parts: Sequence[str]) -> None:
        """Create what is missing, and lock the folder.

        option: the option and its value, which name the folder in messages.

        Raises:
          ConfigError: the folder cannot be written, or another server uses it.
        """
        self.parts = [folder / name for name in parts]
        try:
            for part in self.parts:
                part.mkdir(mode=0o700, parents=True, exist_ok=True)
            # The system releases the lock when the process ends, even if the process is killed.
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | _FLAGS, 0o600)
        except OSError as error:
            msg = f"{option} cannot be used ({error.strerror}): choose another directory"
            raise ConfigError(msg) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            msg = f"another server uses {option}: choose another directory"
            raise ConfigError(msg) from None

    def close(self) -> None:
        """Release the lock, so that another server may use the folder."""
        os.close(self._lock)

    def drop_unfinished(self) -> None:
        """Delete the *.part of a server that was killed while it wrote them."""
        for path in (path for part in self.parts for path in part.glob("*.part")):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


def read_records(folder: Path, kind: type[S], damaged: list[Path]) -> Iterator[tuple[Path, S]]:
    """Yield the JSON records in a folder with their sorted paths.

    damaged: gets the paths of records that cannot be read; they are logged, and stay on disk.
    """
    for path in sorted(folder.glob("*.json")):
        try:
            fault("record.read")
            data = read_regular(path, _MOST_RECORD_BYTES)
            if data is None:
                raise OSError(errno.EINVAL, "no file, or too large for a record")
            yield path, msgspec.json.decode(data, type=kind)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            log.error("%s is damaged and left out (%s): repair or delete it", path, error)
            damaged.append(path)


def open_plain(path: Path, flags: int = os.O_RDONLY) -> int:
    """Return a descriptor of a plain file; OSError if it is a link."""
    fault("content.open")
    return os.open(path, flags | _FLAGS, 0o600)


def write_whole(path: Path, value: msgspec.Struct) -> None:
    """Replace a file atomically by the JSON of `value`: readers see the old or the new content."""
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    handle = open_plain(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with os.fdopen(handle, "wb") as out:
            fault("record.write")
            out.write(msgspec.json.encode(value))
            out.flush()
            fault("record.sync")
            os.fsync(out.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_all(handle: int, data: bytes | memoryview) -> None:
    """Write all of `data` to a descriptor, which may take several calls."""
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[
            os.write(handle, remaining[: fault("content.write", len(remaining))]) :
        ]
