"""The folder inside a directory that holds the prefix cache, and nothing else.

The directory is the user's, or a SharedMemory.

Other programs may use the same directory. cpuserve therefore removes files only in a folder
that it has marked, and only files with names that it uses.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from cpuserve.base.errors import ConfigError
from cpuserve.base.fault_points import fault
from cpuserve.core.regular_file import read_regular

FOLDER = "cpuserve-prefix-cache"
# A file with this name and first line excludes the folder from backups
# (https://bford.info/cachedir/).
MARK = "CACHEDIR.TAG"
MARK_TEXT = b"""Signature: 8a477f597d28d172789f06886806bc55
# The prefix cache of cpuserve. What is in this folder may be removed at any time.
"""
_MEMORY = Path("/dev/shm")
_IN_MEMORY = re.compile(r"cpuserve-kv-\d+-[0-9a-f]{16}")
_BEING_MARKED = re.compile(r"\.mark-[0-9a-f]{16}\.tmp")


def claim(directory: Path) -> Path:
    """Return the cache's folder in `directory`; create and mark the folder if needed.

    Raises:
        ConfigError: the name of the folder belongs to a file, or to a folder of another program.
        OSError: the directory cannot be used.
    """
    folder = directory / FOLDER
    if folder.exists() and not folder.is_dir():
        raise _foreign(folder, "which is not a directory")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if is_marked(folder):
        return folder
    # Another process may be writing the mark at this moment.
    names = sorted(path.name for path in folder.iterdir())
    others = [name for name in names if not _BEING_MARKED.fullmatch(name)]
    if others and not is_marked(folder):
        raise _foreign(folder, f"which contains files of another program ({others[0]!r:.80})")
    temporary = folder / f".mark-{secrets.token_hex(8)}.tmp"
    fault("kv_folder.write")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(MARK_TEXT)
    temporary.replace(folder / MARK)
    return folder


def is_marked(folder: Path) -> bool:
    """Whether `claim` has created and marked `folder`."""
    try:
        fault("kv_folder.read")
        return read_regular(folder / MARK, len(MARK_TEXT), links=True) == MARK_TEXT
    except OSError:
        return False


def _foreign(folder: Path, what: str) -> ConfigError:
    return ConfigError(
        f"the prefix cache cannot be kept in {folder}, {what}; set --prefix-cache-dir to another "
        "directory, or move that away"
    )


class SharedMemory:
    """A directory in shared memory, where the engines of one server keep blocks for each other.

    A lock marks the directory as used. The system releases it when this process ends in any way,
    and the next start of a server then removes the directory. path: None before `create`.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self._lock = -1

    def create(self, memory: Path | None = None) -> Path:
        """Make the directory, and remove the directories of servers that have ended.

        Raises:
          OSError: there is no shared memory.
        """
        memory = memory or _MEMORY
        for path in memory.iterdir():
            if _IN_MEMORY.fullmatch(path.name):
                _remove_unused(path)
        while True:
            path = memory / f"cpuserve-kv-{os.getpid()}-{secrets.token_hex(8)}"
            path.mkdir(mode=0o700)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            lock_file(self._lock, wait=True)
            # A server that starts now may have removed the directory before it was locked.
            if path.exists():
                self.path = path
                return path
            os.close(self._lock)

    def clear(self) -> None:
        """Remove all blocks; engines that start later begin anew."""
        if self.path is not None:
            shutil.rmtree(self.path / FOLDER, ignore_errors=True)

    def close(self) -> None:
        """Remove the directory."""
        path, self.path = self.path, None
        if path is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(self._lock)


def _remove_unused(path: Path) -> None:
    """Remove a directory of this user in shared memory, unless its server is alive."""
    if sys.platform == "win32":  # which has no shared memory with files
        return
    with suppress(OSError):
        if path.lstat().st_uid != os.getuid():
            return
        lock = os.open(path / "lock", os.O_RDWR)
        try:
            if lock_file(lock):
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)


def lock_file(fd: int, *, wait: bool = False) -> bool:
    """Lock a file; return False if a process has locked it, or its file system has no locks.

    With `wait`, the function waits until no other process has locked the file.
    """
    if sys.platform == "win32":
        return False
    import fcntl

    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True
