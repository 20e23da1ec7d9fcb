"""BlockFiles: the files of KV blocks that a directory holds, the one used longest ago first."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from cpuserve.log import get_logger

_STALE_S = 3600.0  # a temporary file this old was left by a process that died

log = get_logger("kv")


class BlockFiles:
    """What has last been seen below `directory`; other processes add and remove files, too.

    num_bytes: of all files. num_own: how many are in the folder `own`. Used from several threads.
    """

    def __init__(self, directory: Path, own: Path) -> None:
        self.num_bytes = 0
        self.num_own = 0
        self._directory = directory
        self._own = own
        self._lock = threading.Lock()
        self._sizes: OrderedDict[Path, int] = OrderedDict()
        self._gone: set[Path] | None = None
        self.rescan()

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, path: Path) -> bool:
        return path in self._sizes

    def add(self, path: Path, size: int) -> None:
        """`path` has just been written."""
        with self._lock:
            self._pop(path)
            self._sizes[path] = size
            self.num_bytes += size
            self.num_own += path.parent == self._own

    def used(self, path: Path) -> None:
        """`path` has just been read; also the next start and other processes order by it."""
        with self._lock:
            if path in self._sizes:
                self._sizes.move_to_end(path)
        with suppress(OSError):
            os.utime(path)

    def forget(self, path: Path) -> None:
        """`path` is not there."""
        with self._lock:
            self._pop(path)

    def trim(self, most: int) -> None:
        """Remove what has not been used for longest until `most` bytes are left."""
        with self._lock:
            while self._sizes and self.num_bytes > most:
                self._remove(next(iter(self._sizes)))

    def clear(self) -> None:
        """Remove the own files."""
        with self._lock:
            for path in [path for path in self._sizes if path.parent == self._own]:
                self._remove(path)

    def rescan(self) -> None:
        """See what is there now. Nobody waits for that; what goes meanwhile is not found."""
        with self._lock:
            gone: set[Path] = set()
            self._gone = gone
            known = {path: place for place, path in enumerate(self._sizes)}
        # Times are coarse: what has been written or read here at one time keeps its order.
        found = sorted((age, known.get(path, -1), path, size) for age, path, size in self._scan())
        with self._lock:
            sizes = OrderedDict((path, size) for *_, path, size in found if path not in gone)
            self._gone, self._sizes = None, sizes
            self.num_bytes = sum(sizes.values())
            self.num_own = sum(path.parent == self._own for path in sizes)

    def _scan(self) -> Iterator[tuple[int, Path, int]]:
        """(time of use, path, bytes) of every block; temporary files that were left go."""
        # Where a server has several engines, each has such a directory: platforms/replicas.py.
        for folder in (*self._directory.glob("*"), *self._directory.glob("replica-*/*")):
            with suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    seen = _look(entry)
                    if seen is not None:
                        yield seen

    def _pop(self, path: Path) -> None:
        if self._gone is not None:
            self._gone.add(path)
        size = self._sizes.pop(path, None)
        if size is not None:
            self.num_bytes -= size
            self.num_own -= path.parent == self._own

    def _remove(self, path: Path) -> None:
        self._pop(path)
        with suppress(OSError):
            path.unlink()


def _look(entry: os.DirEntry[str]) -> tuple[int, Path, int] | None:
    """(time of use, path, bytes) of a block file."""
    try:
        if entry.name.endswith(".kv"):
            status = entry.stat()
            return status.st_mtime_ns, Path(entry.path), status.st_size
        if entry.name.endswith(".tmp") and time.time() - entry.stat().st_mtime > _STALE_S:
            Path(entry.path).unlink(missing_ok=True)
    except OSError:
        log.debug("%s has gone", entry.path)
    return None
