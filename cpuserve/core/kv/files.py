"""BlockFiles: the KV block files of a prefix cache folder, least recently used first."""

from __future__ import annotations

import os
import re
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from heapq import merge
from itertools import islice
from pathlib import Path
from typing import TypeVar

from cpuserve.core.kv.cache_folder import FOLDER, is_marked
from cpuserve.log import get_logger

# Files and folders with other names are ignored.
# _MODEL is a folder for one model with its settings,
# _BLOCK is the file of a block in such a folder, and _TEMPORARY is a file that is being written.
_MODEL = re.compile(r"[0-9a-f]{32}")
_BLOCK = re.compile(r"(?:[0-9a-f]{2})+\.kv")
_TEMPORARY = re.compile(r"\.\d+-[0-9a-f]{8}\.tmp")
ITEMS_AT_ONCE = 256  # Python handles 256 items in a tenth of a millisecond
_STALE_S = 3600.0  # an older temporary file was left by a process that has ended

T = TypeVar("T")
# (time of use in ns, index in the old list, path, size in bytes) of a file.
_Found = tuple[int, int, Path, int]

log = get_logger("kv")


class BlockFiles:
    """The block files below `root`, a claimed folder where other processes write as well.

    The list has the files of the last rescan, and the changes that this process made since then.
    The methods are thread-safe.

    num_bytes: size of all files.
    num_own: number of files in the folder `own`.
    """

    def __init__(self, root: Path, own: Path) -> None:
        self.num_bytes = 0
        self.num_own = 0
        self._root = root
        self._own = own
        self._lock = threading.Lock()
        self._sizes: OrderedDict[Path, int] = OrderedDict()
        # None except during a rescan, while _sizes must not change.
        # During a rescan: the sizes of the files that were used since it began,
        # and None for each file that was removed since then.
        self._since: OrderedDict[Path, int | None] | None = None
        self.rescan()

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, path: Path) -> bool:
        return self._size(path) is not None

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
            if (size := self._size(path)) is not None:
                if self._since is None:
                    self._sizes.move_to_end(path)
                else:
                    self._since[path] = size
                    self._since.move_to_end(path)
        with suppress(OSError):
            os.utime(path)

    def forget(self, path: Path) -> None:
        """Remove `path` from the list, because the file does not exist any more."""
        with self._lock:
            self._pop(path)

    def trim(self, most: int) -> None:
        """Remove the least recently used files until at most `most` bytes are left."""
        while True:
            with self._lock:
                if not self._sizes or self.num_bytes <= most:
                    return
                path = next(iter(self._sizes))
                self._pop(path)
            # The file is removed without the lock, because a disk can take long.
            with suppress(OSError):
                path.unlink()

    def rescan(self) -> None:
        """Read the folders again.

        Other threads may change the list meanwhile, and never wait for the disk or for the scan of
        a long list. This method holds the lock only at its beginning, and at its end, when it
        applies their changes to the new list. It releases the GIL after every few files.
        Only one thread may call `add`, `trim` and `rescan`.
        """
        with self._lock:
            self._since = OrderedDict()
        known = {path: place for place, path in enumerate(_unhurried(self._sizes))}
        sizes: OrderedDict[Path, int] = OrderedDict()
        num_bytes = num_own = 0
        # File times are coarse: files with equal times stay in the order of use by this process.
        found = ((age, known.get(path, -1), path, size) for age, path, size in self._scan())
        for *_, path, size in _in_order(_unhurried(found)):
            sizes[path] = size
            num_bytes += size
            num_own += path.parent == self._own
        with self._lock:
            old, self._sizes = self._sizes, sizes
            self.num_bytes, self.num_own = num_bytes, num_own
            since, self._since = self._since, None
            for path, last in since.items():
                if last is None:
                    self._pop(path)
                elif path in sizes:
                    sizes.move_to_end(path)
        del old  # freeing a long list takes time, so the lock is not held here

    def _scan(self) -> Iterator[tuple[int, Path, int]]:
        """Yield (time of use, path, bytes) of every block file; remove stale temporary files."""
        # Each engine has its own folder (platforms/replicas.py), and all engines share the limit.
        replicas = self._root.parent.glob(f"replica-*/{FOLDER}")
        for root in (self._root, *filter(is_marked, replicas)):
            for folder in _folders(root):
                with suppress(OSError), os.scandir(folder) as entries:
                    for entry in entries:
                        seen = _look(entry)
                        if seen is not None:
                            yield seen

    def _size(self, path: Path) -> int | None:
        """Return the size of the file `path`; None if the list does not have it."""
        since = self._since
        if since is not None and path in since:
            return since[path]
        return self._sizes.get(path)

    def _pop(self, path: Path) -> None:
        size = self._size(path)
        if self._since is not None:
            self._since[path] = None
        else:
            self._sizes.pop(path, None)
        if size is not None:
            self.num_bytes -= size
            self.num_own -= path.parent == self._own


def _unhurried(items: Iterable[T]) -> Iterator[T]:
    """Yield the items, and release the GIL after every ITEMS_AT_ONCE items.

    Without this, a thread that waits for the GIL waits for sys.getswitchinterval(), 5 ms.
    """
    for i, item in enumerate(items):
        yield item
        if i % ITEMS_AT_ONCE == ITEMS_AT_ONCE - 1:
            time.sleep(0)


def _in_order(items: Iterator[_Found]) -> Iterator[_Found]:
    """Yield the items in ascending order; sorting all at once would hold the GIL until the end."""
    runs: list[list[_Found]] = []
    while run := sorted(islice(items, ITEMS_AT_ONCE)):
        runs.append(run)
    return _unhurried(merge(*runs))


def _folders(root: Path) -> list[str]:
    """Return the paths of the models' folders in `root`; symbolic links are not followed."""
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
