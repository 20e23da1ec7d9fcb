"""BlockFiles: the KV block files of a prefix cache folder, least recently used first."""

from __future__ import annotations

import os
import re
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from cpuserve.core.kv.owned import FOLDER, is_marked
from cpuserve.log import get_logger

# Only these names are considered: folders, one per model with its settings, and files in them.
_MODEL = re.compile(r"[0-9a-f]{32}")
_BLOCK = re.compile(r"(?:[0-9a-f]{2})+\.kv")
_TEMPORARY = re.compile(r"\.\d+-[0-9a-f]{8}\.tmp")
_STALE_S = 3600.0  # an older temporary file was left behind by a process that died

log = get_logger("kv")


class BlockFiles:
    """The block files below `root`, a claimed folder, in which other processes write, too.

    The list is as of the last rescan, with this process's own changes since. num_bytes: size of all
    files. num_own: number of files in the folder `own`. The methods are thread-safe.
    """

    def __init__(self, root: Path, own: Path) -> None:
        self.num_bytes = 0
        self.num_own = 0
        self._root = root
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
        """Add `path`, which has just been written, as the most recently used file."""
        with self._lock:
            self._pop(path)
            self._sizes[path] = size
            self.num_bytes += size
            self.num_own += path.parent == self._own

    def used(self, path: Path) -> None:
        """Mark `path`, which has just been read, as the most recently used file.

        Its modification time changes, so that other processes and later starts use the same order.
        """
        with self._lock:
            if path in self._sizes:
                self._sizes.move_to_end(path)
        with suppress(OSError):
            os.utime(path)

    def forget(self, path: Path) -> None:
        """Remove `path`, which does not exist any more, from the list."""
        with self._lock:
            self._pop(path)

    def trim(self, most: int) -> None:
        """Remove the least recently used files until at most `most` bytes are left."""
        with self._lock:
            while self._sizes and self.num_bytes > most:
                self._remove(next(iter(self._sizes)))

    def rescan(self) -> None:
        """Read the folders again, without the lock, so that other threads do not wait for the disk.

        Files that other threads remove during the scan are left out of the new list.
        """
        with self._lock:
            gone: set[Path] = set()
            self._gone = gone
            known = {path: place for place, path in enumerate(self._sizes)}
        # File times are coarse: files with equal times keep this process's order of use.
        found = sorted((age, known.get(path, -1), path, size) for age, path, size in self._scan())
        with self._lock:
            sizes = OrderedDict((path, size) for *_, path, size in found if path not in gone)
            self._gone, self._sizes = None, sizes
            self.num_bytes = sum(sizes.values())
            self.num_own = sum(path.parent == self._own for path in sizes)

    def _scan(self) -> Iterator[tuple[int, Path, int]]:
        """Yield (time of use, path, bytes) of every block file; remove stale temporary files."""
        # Each of several engines has its own folder (platforms/replicas.py); all share the limit.
        replicas = self._root.parent.glob(f"replica-*/{FOLDER}")
        for root in (self._root, *filter(is_marked, replicas)):
            for folder in _folders(root):
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


def _folders(root: Path) -> list[str]:
    """Return the folders of models in `root`, without symbolic links, which may lead anywhere."""
    try:
        with os.scandir(root) as entries:
            return [
                entry.path
                for entry in entries
                if _MODEL.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            ]
    except OSError:
        return []


def _look(entry: os.DirEntry[str]) -> tuple[int, Path, int] | None:
    """Return (time of use, path, bytes) of a block file, or None for any other file.

    Removes a stale temporary file of cpuserve and leaves all other files alone.
    """
    try:
        status = entry.stat(follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            return None
        if _BLOCK.fullmatch(entry.name):
            return status.st_mtime_ns, Path(entry.path), status.st_size
        if _TEMPORARY.fullmatch(entry.name) and time.time() - status.st_mtime > _STALE_S:
            Path(entry.path).unlink(missing_ok=True)
    except OSError:
        log.debug("%s was removed during the scan", entry.path)
    return None
