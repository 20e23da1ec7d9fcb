"""DiskCache: KV blocks in files, one each, that survive a restart.

DIR/seed                     32 random bytes that block hashes start from, so that nobody can make
                             prompts whose names collide
DIR/FINGERPRINT/KEY.kv       a block of a model and settings; see `_HEAD`

A file is written under another name and renamed; what is torn, foreign or damaged is removed when
it is read, with one line in the log. What was used longest ago goes when the size is reached.
Several processes may share a directory and its size, which they may pass by a sixteenth each.
Nothing here fails a request: the worst is a miss.
"""

from __future__ import annotations

import errno
import hashlib
import os
import queue
import secrets
import struct
import threading
import zlib
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cpuserve.core.kv.files import BlockFiles
from cpuserve.core.kv.prefix import BlockHash, CachedBlock, PrefixChain
from cpuserve.core.kv.swap import Data
from cpuserve.log import get_logger

MAGIC = b"cpuskv1\n"
SEED_BYTES = 32
# magic, fingerprint, key, parent's key (zeros for a first block), hash of seed and salt, bytes of
# tokens and of data, CRC-32 of all that follows the head and of the head before it.
_HEAD = struct.Struct("<8s32s32s32s32sQQI")
_HEAD_BEFORE_CRC = _HEAD.size - 4
# A process looks for what others have written when it has written this share of the size itself.
_LOOKS = 16

_FULL = (errno.ENOSPC, errno.EDQUOT)
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # the file is there and may be read later

log = get_logger("kv")


@dataclass(frozen=True, slots=True)
class _Name:
    """What identifies a block."""

    key: bytes
    parent: bytes
    root: bytes
    content: bytes


class DiskCache:
    """Blocks of `block_bytes` in `directory`, at most `max_bytes` of files, all models together.

    fingerprint: 32 bytes that differ wherever the same tokens could have other bytes. queue_bytes:
    memory for blocks that wait to be written, one at least; more are not kept. cpus: where to write
    from; none: any that the maker may use. `seed` is for the hashes of blocks. Raises OSError if
    the directory cannot be used.
    """

    def __init__(
        self,
        directory: Path,
        fingerprint: bytes,
        block_bytes: int,
        max_bytes: int,
        queue_bytes: int,
        cpus: Collection[int] = (),
    ) -> None:
        self._directory = directory / fingerprint.hex()[:32]
        self._fingerprint = fingerprint
        self._block_bytes = block_bytes
        self._max_bytes = max_bytes
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.seed = _read_seed(directory / "seed")
        self._files = BlockFiles(directory, self._directory)
        self._files.trim(max_bytes)
        self._written = 0  # bytes since others' files were looked for
        self._broken = 0
        self._failed = False
        self._pending: set[bytes] = set()
        self._queue: queue.Queue[tuple[_Name, Data] | None] = queue.Queue(
            max(1, queue_bytes // block_bytes)
        )
        self._cpus = cpus
        self._thread = threading.Thread(target=self._run, name="cpuserve-kv-disk", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Blocks of this fingerprint."""
        return self._files.num_own

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return self._files.num_bytes

    @property
    def num_files(self) -> int:
        """Blocks of every fingerprint: all that num_bytes counts."""
        return len(self._files)

    # --- reading ------------------------------------------------------------------------------

    def has(self, key: BlockHash) -> bool:
        """A block with this name seems to be here."""
        return self._path(key) in self._files

    def load(self, chain: PrefixChain, index: int) -> bytes | None:
        """The bytes of block `index` of `chain`; None if its file is gone, foreign or damaged."""
        parent = chain.keys[index - 1] if index else b""
        name = self._name(chain.keys[index], parent, chain.salt, chain.contents[index])
        path = self._path(name.key)
        try:
            raw = path.read_bytes()
        except OSError as error:
            if (
                error.errno not in _PASSING
            ):  # gone, or on a disk that fails: no second wait for that
                self._files.forget(path)
            log.debug("%s cannot be read: %s", path, error)
            return None
        data = self._unpack(name, raw)
        if data is None:
            self._remove_broken(path)
            return None
        self._files.used(path)
        return data

    def _unpack(self, name: _Name, raw: bytes) -> bytes | None:
        if len(raw) < _HEAD.size:
            return None
        *head, content_bytes, data_bytes, crc = _HEAD.unpack_from(raw)
        want = [MAGIC, self._fingerprint, name.key, name.parent, name.root]
        begin = _HEAD.size + content_bytes
        if head != want or data_bytes != self._block_bytes or len(raw) != begin + data_bytes:
            return None
        if zlib.crc32(memoryview(raw)[_HEAD.size :], zlib.crc32(raw[:_HEAD_BEFORE_CRC])) != crc:
            return None
        return raw[begin:] if raw[_HEAD.size : begin] == name.content else None

    def _remove_broken(self, path: Path) -> None:
        self._broken += 1
        if self._broken == 1:
            log.warning("a cached block is torn, foreign or damaged and is removed: %s", path)
        with suppress(OSError):
            path.unlink()
        self._files.forget(path)

    # --- writing ------------------------------------------------------------------------------

    def wants(self, entry: CachedBlock) -> bool:
        """The block of `entry` is not here and could be."""
        return not (self._failed or entry.key in self._pending or self.has(entry.key))

    @property
    def has_room(self) -> bool:
        """A block that is put now need not wait before it may wait."""
        return not self._queue.full()

    def put(self, entry: CachedBlock, data: Data, wait_s: float = 0.0) -> bool:
        """Have `data`, what the block of `entry` holds, written; False if too much waits already.

        wait_s: how long to wait for room among what waits.
        """
        parent = entry.parent.key if entry.parent is not None else b""
        name = self._name(entry.key, parent, entry.salt, entry.content)
        self._pending.add(name.key)
        try:
            self._queue.put((name, data), block=wait_s > 0, timeout=wait_s or None)
        except queue.Full:
            self._pending.discard(name.key)
            return False
        return True

    def clear(self) -> None:
        """Remove the blocks of this fingerprint."""
        self._files.clear()

    def close(self, wait_s: float = 2.0) -> None:
        """Finish writing, for `wait_s` at most."""
        try:
            self._queue.put(None, timeout=wait_s)
        except queue.Full:
            return
        self._thread.join(wait_s)

    def _run(self) -> None:
        if self._cpus and hasattr(os, "sched_setaffinity"):
            # A new thread inherits the CPUs of its maker, and a compute thread has just one, for
            # which this one would compete.
            with suppress(OSError):
                os.sched_setaffinity(0, self._cpus)
        while (item := self._queue.get()) is not None:
            name, data = item
            if not self._failed:
                self._write(name, data)
            self._pending.discard(name.key)

    def _write(self, name: _Name, data: Data) -> None:
        head = _HEAD.pack(
            MAGIC,
            self._fingerprint,
            name.key,
            name.parent,
            name.root,
            len(name.content),
            len(data),
            0,
        )[:_HEAD_BEFORE_CRC]
        crc = zlib.crc32(data, zlib.crc32(name.content, zlib.crc32(head)))
        parts = (head, struct.pack("<I", crc), name.content, data)
        try:
            self._store_somehow(self._path(name.key), parts)
        except OSError as error:
            self._failed = True
            log.warning("the prefix cache on disk is no longer written: %s", error)

    def _store_somehow(self, path: Path, parts: tuple[Data, ...]) -> None:
        """The same where the first attempt meets a directory or a disk that is not as it was."""
        try:
            self._store(path, parts)
        except FileNotFoundError:  # somebody has emptied the directory, to clear the cache
            self._begin_again()
            self._store(path, parts)
        except OSError as error:
            if error.errno not in _FULL or not self._shrink(sum(map(len, parts))):
                raise
            self._store(path, parts)

    def _shrink(self, size: int) -> bool:
        """Have no more than there is now, since the disk has no more; False if `size` is."""
        self._look_again()
        if size > self.num_bytes:
            return False
        self._max_bytes = min(self._max_bytes, self.num_bytes)
        log.info("the disk of the prefix cache is full: %d bytes of files is all", self._max_bytes)
        return True

    def _store(self, path: Path, parts: tuple[Data, ...]) -> None:
        size = sum(map(len, parts))
        if not self._make_room(size):
            return
        temporary = self._directory / f".{os.getpid()}-{secrets.token_hex(4)}.tmp"
        try:
            with os.fdopen(
                os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"
            ) as f:
                for part in parts:
                    f.write(part)
            temporary.replace(path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise
        self._files.add(path, size)
        self._written += size

    def _begin_again(self) -> None:
        """Make the directory anew, with the same seed, and see what is left of the files."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _read_seed(self._directory.parent / "seed", self.seed)
        self._look_again()

    def _make_room(self, size: int) -> bool:
        if self._written * _LOOKS >= self._max_bytes:
            self._look_again()
        self._files.trim(self._max_bytes - size)
        return self.num_bytes + size <= self._max_bytes

    def _look_again(self) -> None:
        self._written = 0
        self._files.rescan()

    # --- common -------------------------------------------------------------------------------

    def _name(self, key: bytes, parent: bytes, salt: str, content: bytes) -> _Name:
        root = hashlib.sha256(self.seed + salt.encode("utf-8", "surrogatepass")).digest()
        return _Name(key, parent or bytes(32), root, content)

    def _path(self, key: bytes) -> Path:
        return self._directory / f"{key.hex()}.kv"


def _read_seed(path: Path, new: bytes = b"") -> bytes:
    """The seed in `path`, made (or `new`) if there is none; a torn one is replaced."""
    try:
        seed = path.read_bytes()
    except FileNotFoundError:
        seed = b""
    if len(seed) == SEED_BYTES:
        return seed
    temporary = path.with_name(f".seed-{secrets.token_hex(8)}.tmp")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(new or secrets.token_bytes(SEED_BYTES))
    try:
        if seed:
            log.warning("%s is torn: blocks cached under it are lost", path)
            temporary.replace(path)
        else:
            os.link(temporary, path)  # fails if another process was first
    except FileExistsError:
        log.debug("%s has just been made", path)
    except OSError:  # no links there, as on FAT and some network file systems
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path.read_bytes()
