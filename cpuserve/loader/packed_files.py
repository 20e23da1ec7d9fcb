"""Files of packed weights in the cache directory, which make later starts faster.

FOLDER/LAYOUT-SOURCE.weights   2 MB with a header, then the arenas of packed matrices
                               (csrc/runtime/weights.h). LAYOUT is the start of the digest that
                               describes the matrices (layout, kinds, level, ranks, version).
                               SOURCE is the start of the digest of the model's files
FOLDER/.LAYOUT-SOURCE.tmp      a file that is being written
FOLDER/LAYOUT-SOURCE.heat      how often each expert was used (runtime/expert_memory.py); it is
                               removed together with its file of weights, as the next one
FOLDER/LAYOUT-SOURCE.use.json  the model that has these experts, and the rate of the disk
FOLDER/*.source.json           the digests of models' files (source_digest.py)

The header has both complete digests, and a digest of the matrices that is compared when they
are read. The process that writes a file locks it exclusively, and renames it when it is complete.
A process that reads a file holds a shared lock, and a locked file is not removed.
The least recently used files are removed when the size limit would be exceeded.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import re
import shutil
from array import array
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from cpuserve.base.fault_points import fault
from cpuserve.config.env import cache_dir
from cpuserve.config.values import format_bytes, format_gib_up
from cpuserve.core.regular_file import read_regular, replace_file

FOLDER = "packed-weights"  # of the cache directory
USE = ".use.json"
MAGIC = b"cpuserve weights 1\n"
HEADER_BYTES = 2 << 20  # Buffer::kPage (csrc/base/buffer.h): the first arena begins there
MOST_JSON = 4096
MOST_HEAT_BYTES = 4 << 20  # of a million matrices, which no model has
FREE_BYTES = 1 << 30  # number of bytes that must stay free on the disk
MOST_RECORDS = 500
_NAME = re.compile(r"[0-9a-f]{24}-[0-9a-f]{24}\.weights")
_TEMPORARY = re.compile(r"\.[0-9a-f]{24}-[0-9a-f]{24}\.tmp")


class NoRoom(OSError):
    """The limits leave no room for a file; the message says which limit."""


@dataclass(slots=True)
class PackedFile:
    """An open file of packed weights, locked until it is closed.

    digest: a hash of its matrices, which readers compare; -1 while the file is being written.
    """

    path: Path
    fd: int
    digest: int = -1

    def close(self) -> None:
        """Unlock and close the file; mappings of it stay valid."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def discard(self) -> None:
        """Remove the file, because it is damaged or was not completed."""
        with suppress(OSError):
            self.path.unlink()
            _remove_records(self.path)
        self.close()


class PackedFiles:
    """The files of packed weights in `folder`; together they have at most `most_bytes`.

    layout: the digest that describes the matrices.
    size: size in bytes of a file with these matrices.
    """

    def __init__(self, folder: Path, most_bytes: int, layout: str, size: int) -> None:
        self.folder = folder
        self._most_bytes = most_bytes
        self._layout = layout
        self._size = size

    def any(self) -> bool:
        """Whether there is a file with this layout, made from any model."""
        with suppress(OSError):
            return any(self.folder.glob(f"{self._layout[:24]}-*.weights"))
        return False

    def open(self, source: str) -> PackedFile | None:
        """Return the file for this source, or None; remove a truncated or altered file.

        Raises:
            OSError: the file is damaged or cannot be opened; the message says how.
        """
        path = self._path(source)
        try:
            fault("packed.open")
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:  # another process is removing the file at this moment
            os.close(fd)
            return None
        file = PackedFile(path, fd)
        try:
            file.digest = self._check(fd, source)
        except OSError:
            file.discard()
            raise
        with suppress(OSError):  # this fails in a read-only folder, where no file is removed
            os.utime(path)
        return file

    def create(self, source: str, *, wait: bool) -> PackedFile | None:
        """Create a file of full size without content; `commit` or `discard` must follow.

        Returns None if the file exists or another process is writing it.
        With `wait`, the method waits until the other process has finished.

        Raises:
            NoRoom: the size limit, or the space on the disk, is too small.
            OSError: the folder cannot be used.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._path(source).with_suffix(".tmp")
        path = path.with_name(f".{path.name}")
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            file = PackedFile(path, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                file.close()
                return None
            if _is_at(fd, path):
                break
            file.close()  # the process that wrote it has renamed or removed it
            if self._path(source).exists():
                return None
        try:
            if self._path(source).exists():
                file.discard()
                return None
            fault("packed.allocate")
            os.ftruncate(fd, 0)
            self._make_room()
            # Allocate the whole file on the disk.
            # Otherwise a full disk would end the process when it writes to the mapping.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, self._size)
            else:  # macOS
                os.ftruncate(fd, self._size)
        except OSError:
            file.discard()
            raise
        return file

    def commit(self, file: PackedFile, source: str, digest: int) -> None:
        """Finish a file that has its content, so that later starts find it.

        Raises:
            OSError: the file could not be written, and was removed.
        """
        try:
            os.pwrite(file.fd, self._header(source, digest), 0)
            fault("packed.sync")
            os.fsync(file.fd)
            path = self._path(source)
            file.path.rename(path)
            file.path, file.digest = path, digest
            fcntl.flock(file.fd, fcntl.LOCK_SH)
            _sync(self.folder)
        except OSError:
            file.discard()
            raise

    def _path(self, source: str) -> Path:
        return self.folder / f"{self._layout[:24]}-{source[:24]}.weights"

    def _header(self, source: str, digest: int) -> bytes:
        facts = {"layout": self._layout, "source": source, "bytes": self._size, "digest": digest}
        text = json.dumps(facts).encode()
        return MAGIC + hashlib.sha256(text).digest() + len(text).to_bytes(4, "little") + text

    def _check(self, fd: int, source: str) -> int:
        """Return the digest of the matrices from the header; OSError if the file is wrong."""
        fault("packed.read")
        found = os.pread(fd, len(MAGIC) + 36 + MOST_JSON, 0)
        size = os.fstat(fd).st_size
        head, text = found[: len(MAGIC) + 36], found[len(MAGIC) + 36 :]
        text = text[: int.from_bytes(head[-4:], "little")]
        if head[:-36] != MAGIC or hashlib.sha256(text).digest() != head[-36:-4]:
            msg = "its header is damaged"
            raise OSError(msg)
        facts = json.loads(text)
        if size != self._size or found != self._header(source, facts["digest"]).ljust(
            len(found), b"\0"
        ):
            msg = f"it has {size} bytes instead of {self._size}, or holds other weights"
            raise OSError(msg)
        return int(facts["digest"])

    def _make_room(self) -> None:
        """Remove files until there is room for one more file; NoRoom if there is not enough."""
        if self._size > self._most_bytes:
            msg = (
                f"the packed weights have {format_bytes(self._size)}, more than "
                f"--weight-cache-size allows; give at least {format_gib_up(self._size)}"
            )
            raise NoRoom(msg)
        used = sorted(
            ((entry.stat(), entry) for entry in self.folder.iterdir()),
            key=lambda item: item[0].st_mtime_ns,
        )
        records = [entry for _, entry in used if entry.name.endswith(".source.json")]
        for entry in records[:-MOST_RECORDS]:
            entry.unlink(missing_ok=True)
        ours = [
            (status.st_size, entry)
            for status, entry in used
            if _NAME.fullmatch(entry.name) or _TEMPORARY.fullmatch(entry.name)
        ]
        total = sum(size for size, _ in ours)
        for size, entry in ours:
            stale = _TEMPORARY.fullmatch(entry.name) is not None
            if (stale or not self._fits(total)) and _remove_unused(entry):
                total -= size
        if not self._fits(total):
            free = shutil.disk_usage(self.folder).free
            msg = (
                f"the packed weights need {format_bytes(self._size)}; files in use take "
                f"{format_bytes(total)} of --weight-cache-size, and {format_bytes(free)} of the "
                f"disk is free, of which {format_bytes(FREE_BYTES)} stays free"
            )
            raise NoRoom(msg)

    def _fits(self, total: int) -> bool:
        """Whether one more file fits if the existing files have `total` bytes."""
        free = shutil.disk_usage(self.folder).free
        return total + self._size <= self._most_bytes and free >= self._size + FREE_BYTES


def keep_use(weights: Path, model: str, rate: float) -> None:
    """Record that a file of packed weights is of a model, and its disk's rate in bytes/s.

    Raises:
        OSError: the record cannot be written.
    """
    fault("expert_use.write")
    replace_file(weights.with_suffix(USE), json.dumps({"model": model, "rate": rate}).encode())


def earlier_use(model: str) -> dict[str, Any]:
    """Return the fields of ModelFacts about the use of experts by earlier requests; {} if unknown.

    The newest record counts: a model has several with different settings.
    """
    found: dict[str, Any] = {}
    newest = -1.0
    with suppress(OSError):
        fault("expert_use.read")
        for path in (cache_dir() / FOLDER).glob(f"*{USE}"):
            with suppress(OSError, ValueError, KeyError, TypeError):
                heat = Path(str(path).removesuffix(USE) + ".heat")
                record = json.loads(read_regular(path, MOST_JSON) or b"")
                rate, time = float(record["rate"]), heat.stat().st_mtime
                if record["model"] != model or time <= newest or not math.isfinite(rate):
                    continue
                found = {"expert_misses": misses_of(heat), "expert_rate": rate}
                newest = time
    return found


def read_heat(heat: Path) -> bytes:
    """Return the content of the file of an ExpertHeat: fp32 values.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no regular file, or has more than MOST_HEAT_BYTES.
    """
    content = read_regular(heat, MOST_HEAT_BYTES)
    if content is None:
        msg = "the use of experts is not in a file of its size"
        raise ValueError(msg)
    return content


def misses_of(heat: Path) -> tuple[float, ...]:
    """Return the shares of uses that miss if 0, 1 .. 100 % of the experts are in memory.

    These are the experts that were used most. heat: the file of an ExpertHeat.

    Raises:
        OSError: the file cannot be read.
        ValueError: it has no uses, or read_heat refuses it.
    """
    uses = array("f", read_heat(heat))
    if not (0 < sum(uses) < math.inf and min(uses) >= 0):
        raise ValueError
    missed = missed_uses(uses)
    return tuple(missed[percent * len(uses) // 100] for percent in range(101))


def missed_uses(uses: Iterable[float]) -> list[float]:
    """Return the shares of uses that miss if 0, 1, 2 .. of the experts are in memory.

    These are the experts that were used most. uses: of each expert, with a sum above 0.
    """
    kept = list(accumulate(sorted(uses, reverse=True), initial=0.0))
    return [max(0.0, 1.0 - share / kept[-1]) for share in kept]


def _remove_records(weights: Path) -> None:
    for suffix in (".heat", USE):
        weights.with_suffix(suffix).unlink(missing_ok=True)
    for left in weights.parent.glob(f".{weights.stem}.*.tmp"):  # by a server that was killed
        left.unlink(missing_ok=True)


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except OSError:
        return False


def _remove_unused(path: Path) -> bool:
    """Remove a file unless a process has locked it; return whether it was removed."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return not path.exists()
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
        _remove_records(path)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def remove_all(cache: Path) -> int:
    """Remove all packed weights in a cache directory that no process uses; return their bytes."""
    files = [(path.stat().st_size, path) for path in (cache / FOLDER).glob("*.weights")]
    return sum(size for size, path in files if _remove_unused(path))


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
