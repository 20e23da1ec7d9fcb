"""DiskCache: KV blocks on disk, one file per block, which survive a restart.

FOLDER is DIR/cpuserve-prefix-cache (cache_folder.py); nothing else in DIR is touched.

FOLDER/CACHEDIR.TAG          marks the folder as made by cpuserve
FOLDER/seed                  32 random bytes that block hashes start from: nobody else can prepare
                             prompts with colliding hashes
FOLDER/FINGERPRINT/KEY.kv    one block of a model and its settings (block_file.py).
                             KEY is the hash of the block; in every cache group but the first
                             one, KEY is a hash of this hash and the group, with a mark of the head
                             if it is the group of a head. Parts of encoded items have such files
                             as well

A file is written under a temporary name and then renamed. A file that is incomplete,
damaged or written with other settings is removed when it is read; the first such file is logged.
The least recently used files are removed when the size limit is reached.
Several processes may share a directory and its limit; each process may exceed the limit by up
to a sixteenth. If reading or writing fails, no request fails: the block counts as a cache miss.
"""

from __future__ import annotations

import errno
import mmap
import os
import queue
import re
import secrets
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from heapq import merge
from itertools import islice
from pathlib import Path
from typing import TypeVar

from cpuserve.base.affinity import move_to
from cpuserve.base.fault_points import fault
from cpuserve.base.log import get_logger
from cpuserve.core.kv.block_file import (
    SEED_BYTES,
    TEMPORARY,
    BlockFormat,
    BlockName,
    file_name,
)
from cpuserve.core.kv.cache_folder import claim, lock_file
from cpuserve.core.kv.prefix import BlockHash, CachedBlock, PrefixChain
from cpuserve.core.kv.tier import Data, TierBlock, TierNeeds
from cpuserve.core.regular_file import open_regular, read_regular
from cpuserve.core.secret_file import read_secret

# Files and folders with other names are ignored.
# _MODEL is a folder for one model with its settings,
# _BLOCK is the file of a block in such a folder, and _TEMPORARY is a file that is being written.
_MODEL = re.compile(r"[0-9a-f]{32}")
_BLOCK = re.compile(r"(?:[0-9a-f]{2})+\.kv")
_TEMPORARY = re.compile(r"\.\d+-[0-9a-f]{8}\.tmp")
ITEMS_AT_ONCE = 256  # Python handles 256 items in a tenth of a millisecond
# An older temporary file was left by a process that has ended, on a file system without locks.
_STALE_S = 3600.0

T = TypeVar("T")
# (time of use in ns, index in the old list, path, size in bytes) of a file.
_Found = tuple[int, int, Path, int]


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
        for folder in _folders(self._root):
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
        fault("kv_scan.read")
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
        if _TEMPORARY.fullmatch(entry.name):
            if time.time() - status.st_mtime > _STALE_S:
                Path(entry.path).unlink(missing_ok=True)
            else:
                _remove_abandoned(Path(entry.path))
    except OSError:
        log.debug("%s was removed during the scan", entry.path)
    return None


def _remove_abandoned(path: Path) -> None:
    """Remove a temporary file if its writer has ended: the system has then released its lock."""
    # A FIFO that has taken its place is not waited for, and the file of another is not opened.
    flags = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
    fd = os.open(path, os.O_WRONLY | flags)
    try:
        if lock_file(fd):
            path.unlink()
    finally:
        os.close(fd)


# Seconds until a file that did not exist is looked for again, and how many such files are known.
_ABSENT_S, _MOST_ABSENT = 0.5, 4096
# After writing 1/16 of the size limit, a process rescans the folder for files of other processes.
_RESCANS = 16

_FULL = (errno.ENOSPC, errno.EDQUOT)

log = get_logger("kv")


class DiskCache:
    """Keeps blocks in `directory`, at most `max_bytes` of files for all models.

    queue_bytes: memory for blocks that wait to be written (at least one block);
      further blocks are not saved while the queue is full.
    cpus: CPUs of the writing thread; empty = the CPUs of the thread that creates this object.
    name: the tier's name: "disk", or "host" for a directory in shared memory, where files are
      mapped read-only instead of copied.
    finds_new: files that other processes write are found at once, not only after a rescan.
    `seed`: the bytes that block hashes start from.

    Raises:
        OSError: the directory cannot be used.
        ConfigError: the folder contains files of another program.
    """

    durable = True

    def __init__(
        self,
        directory: Path,
        needs: TierNeeds,
        max_bytes: int,
        queue_bytes: int,
        cpus: Collection[int] = (),
        *,
        name: str = "disk",
        finds_new: bool = False,
    ) -> None:
        self.name = name
        self._finds_new = finds_new
        self._absent: dict[Path, float] = {}  # when to look for a file again (time.monotonic)
        root = claim(directory)
        self.seed = _read_seed(root / "seed")
        self._format = BlockFormat(needs, self.seed)
        self._directory = root / self._format.folder
        self._max_bytes = max_bytes
        self._directory.mkdir(mode=0o700, exist_ok=True)
        self._files = BlockFiles(root, self._directory)
        self._files.trim(max_bytes)
        self._written = 0  # bytes that this process has written since the last rescan
        self._broken = 0
        self._failed = False
        self._pending: set[bytes] = set()
        self._sizes = needs.sizes
        self._queue: queue.SimpleQueue[tuple[BlockName, Data] | None] = queue.SimpleQueue()
        self._queue_bytes = queue_bytes
        self._queued_bytes = 0
        # _room protects _queued_bytes, and is notified when the queue shrinks.
        self._room = threading.Condition()
        self._cpus = cpus
        self._thread = threading.Thread(target=self._run, name="cpuserve-kv-disk", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Return the number of blocks of this model with its settings."""
        return self._files.num_own

    @property
    def num_bytes(self) -> int:
        """The size of all files in bytes."""
        return self._files.num_bytes

    @property
    def num_blocks(self) -> int:
        """The number of blocks of all models and settings (`num_bytes` is their size)."""
        return len(self._files)

    # --- reading ------------------------------------------------------------------------------

    def find(self, chain: PrefixChain, index: int, group: int) -> bool:
        """Whether there is a file of block `index` of `chain`, as far as this process knows."""
        return self._has(chain.keys[index], group)

    def _has(self, key: BlockHash, group: int) -> bool:
        path = self._path(self._format.key(key, group))
        return path in self._files or (self._finds_new and self._is_new(path))

    def _is_new(self, path: Path) -> bool:
        """Whether another process has written `path` since the last rescan."""
        now = time.monotonic()
        if now < self._absent.get(path, 0.0):
            return False
        if path.exists():
            return True
        if len(self._absent) >= _MOST_ABSENT:
            self._absent.clear()
        self._absent[path] = now + _ABSENT_S
        return False

    def load(self, chain: PrefixChain, index: int, group: int) -> TierBlock | None:
        """Return the bytes of block `index` of `chain` in a cache group.

        Returns None if there is no file, or if it is damaged or from other settings.
        """
        parent = chain.keys[index - 1] if index else b""
        key, content = chain.keys[index], chain.contents[index]
        data = self.load_file(self._format.name(key, group, parent, chain.salt, content))
        return None if data is None else (data, None)

    def media(self, digest: bytes, part: int, size: int) -> BlockName:
        """Return the name of the file with a part of an encoded item."""
        return self._format.media(digest, part, size)

    def has_file(self, name: BlockName) -> bool:
        """Whether a file with this name was found at the last rescan or later."""
        return self._path(name.key) in self._files

    def load_file(self, name: BlockName) -> Data | None:
        """Return the data of a file; None if it is missing, damaged or from other settings."""
        path = self._path(name.key)
        try:
            fault("kv_block.read")
            read = read_regular if self.name == "disk" else _mapped
            raw = read(path, name.file_bytes)
        except OSError as error:
            # The file is gone or the disk fails: the next request does not wait for it again.
            if error.errno not in TEMPORARY:
                self._files.forget(path)
            log.debug("%s cannot be read: %s", path, error)
            return None
        data = None if raw is None else self._format.unpack(name, raw)
        if data is None:
            self._remove_broken(path)
            return None
        self._files.used(path)
        return data

    def _remove_broken(self, path: Path) -> None:
        self._broken += 1
        if self._broken == 1:
            log.warning(
                "%s in the prefix cache is torn (incomplete), damaged or from other settings; it "
                "is removed and its block is computed again; further ones are removed silently",
                path,
            )
        with suppress(OSError):
            path.unlink()
        self._files.forget(path)

    # --- writing ------------------------------------------------------------------------------

    def wants(self, entry: CachedBlock, group: int) -> bool:
        """Whether `put` should be called for the block: it is not saved yet, and writing works."""
        pending = self._format.key(entry.key, group) in self._pending
        return not (self._failed or pending or self._has(entry.key, group))

    def wants_file(self, name: BlockName) -> bool:
        """Whether `put_file` should be called: the file is missing, and writing works."""
        return not (self._failed or name.key in self._pending or self.has_file(name))

    def ready(self, group: int) -> bool:
        """Whether the write queue has room for a block of a cache group."""
        return self._fits(self._sizes[group])

    def _fits(self, size: int) -> bool:
        return not self._queued_bytes or self._queued_bytes + size <= self._queue_bytes

    def put(self, entry: CachedBlock, group: int, data: Data, wait_s: float = 0.0) -> bool:
        """Queue `data`, the content of the block of `entry` in a cache group, for writing.

        wait_s: seconds to wait while the queue is full. Returns False if it is still full then.
        """
        parent = entry.parent.key if entry.parent is not None else b""
        name = self._format.name(entry.key, group, parent, entry.salt, entry.content)
        return self.put_file(name, data, wait_s)

    def put_file(self, name: BlockName, data: Data, wait_s: float) -> bool:
        """Queue a file for writing, as `put` does."""
        with self._room:
            if not self._room.wait_for(lambda: self._fits(name.size), wait_s):
                return False
            self._queued_bytes += name.size
        self._pending.add(name.key)
        self._queue.put((name, data))
        return True

    def filled(self, entry: CachedBlock, group: int) -> None:
        """Keep the file, which is still valid."""

    def close(self, wait_s: float = 2.0) -> None:
        """Write the queued blocks to disk; stop waiting for that after `wait_s` seconds."""
        self._queue.put(None)
        self._thread.join(wait_s)

    def _run(self) -> None:
        # The creator may be a compute thread, which is pinned to one CPU: this thread would compete
        # for it.
        move_to(self._cpus)
        while (item := self._queue.get()) is not None:
            name, data = item
            if not self._failed:
                self._write(name, data)
            self._pending.discard(name.key)
            with self._room:
                self._queued_bytes -= name.size
                self._room.notify()

    def _write(self, name: BlockName, data: Data) -> None:
        # This thread must survive every error, even a lack of memory:
        # if the queue is full, `put` waits for this thread to remove a block from it.
        try:
            self._store_or_repair(self._path(name.key), self._format.pack(name, data))
        except Exception as error:
            self._failed = True
            log.warning(
                "a block cannot be written to the prefix cache on disk (%s), so no further blocks "
                "are written until the next start; existing ones are still read",
                str(error) or type(error).__name__,
            )

    def _store_or_repair(self, path: Path, parts: tuple[Data, ...]) -> None:
        """Store a file; retry once after recreating a removed directory or shrinking the cache."""
        try:
            self._store(path, parts)
        except FileNotFoundError:  # a user has emptied the directory to clear the cache
            self._recreate()
            self._store(path, parts)
        except OSError as error:
            if error.errno not in _FULL or not self._shrink(sum(map(len, parts))):
                raise
            self._store(path, parts)

    def _shrink(self, size: int) -> bool:
        """Lower the limit to the current size, because the disk is full.

        Returns False if a single file of `size` bytes would exceed the new limit.
        """
        self._rescan()
        if size > self.num_bytes:
            return False
        self._max_bytes = min(self._max_bytes, self.num_bytes)
        log.info(
            "the disk of the prefix cache is full, so the cache is limited to its current %d bytes",
            self._max_bytes,
        )
        return True

    def _store(self, path: Path, parts: tuple[Data, ...]) -> None:
        size = sum(map(len, parts))
        if not self._free_space(size):
            return
        temporary, fd = _create_temporary(self._directory)
        try:
            with os.fdopen(fd, "wb") as f:
                fault("kv_block.write")
                for part in parts:
                    f.write(part)
            temporary.replace(path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise
        self._files.add(path, size)
        self._written += size

    def _recreate(self) -> None:
        """Create the directory again with the same seed, and rescan the remaining files."""
        root = claim(self._directory.parent.parent)
        self._directory.mkdir(mode=0o700, exist_ok=True)
        _read_seed(root / "seed", self.seed)
        self._rescan()

    def _free_space(self, size: int) -> bool:
        """Remove files until a new file of `size` bytes fits; False if the limit is smaller."""
        if self._written * _RESCANS >= self._max_bytes:
            self._rescan()
        self._files.trim(self._max_bytes - size)
        return self.num_bytes + size <= self._max_bytes

    def _rescan(self) -> None:
        self._written = 0
        self._files.rescan()

    # --- helpers of the methods above ---------------------------------------------------------

    def _path(self, key: bytes) -> Path:
        return self._directory / file_name(key)


def _create_temporary(folder: Path) -> tuple[Path, int]:
    """Return the path and the descriptor of a new file that only this process may remove.

    A process that scans the folder may remove the file before it is locked (_remove_abandoned).
    """
    while True:
        path = folder / f".{os.getpid()}-{secrets.token_hex(4)}.tmp"
        fault("kv_block.open")
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        lock_file(fd, wait=True)
        if path.exists():
            return path, fd
        os.close(fd)


def _mapped(path: Path, size: int) -> memoryview | None:
    """Return the content of a file of `size` bytes that nobody changes, mapped read-only.

    Returns None if it has another size or is no regular file.
    """
    file = open_regular(path, size)
    if file is None:
        return None
    with file:
        if os.fstat(file.fileno()).st_size != size:
            return None
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _read_seed(path: Path, new: bytes = b"") -> bytes:
    """Return the seed in `path`; write `new` or random bytes if it is missing or incomplete."""
    lost = "the blocks cached with it cannot be found any more and are computed again"
    return read_secret(path, SEED_BYTES, lost, new)
