"""The digest of a model's weight files; files of packed weights are valid for one digest.

The size and time of a file do not prove its content, and reading a whole file takes seconds.
The digest of the whole content is therefore computed once, and recorded together with the identity
of the file: device, inode, size, the times of its last change (including ctime, which no program
can set), and a hash of samples. If any of these differs, the content is read again. In the cache
of the Hugging Face hub, the name of a file is the SHA-256 of its content, which is used as it is.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from cpuserve.base.fault_points import fault
from cpuserve.core.regular_file import replace_file
from cpuserve.loader.content import sampled
from cpuserve.loader.gguf.parts import part_names

PART_BYTES = 16 << 20  # number of bytes of a file that one thread hashes at a time
# The digest of a file is recorded only if its last change is at least this old.
# Otherwise the file could change again without a new time of change.
SETTLED_NS = 2_000_000_000
_SHA256 = re.compile(r"[0-9a-f]{64}")


def weight_files(path: Path, mmproj: str | None = None) -> list[Path]:
    """Return the files with the tensors of a model: a directory of safetensors, or a .gguf file.

    mmproj: a further file, with the tower.
    """
    if path.is_dir():
        return sorted(path.glob("*.safetensors"))
    files = [path.parent / name for name in part_names(path.name)]
    return files if mmproj is None else [*files, Path(mmproj)]


def samples_of(file: Path, size: int) -> str:
    """Return a hash of samples of `file`, which has `size` bytes (see `sampled`)."""
    with file.open("rb", buffering=0) as stream:
        return sampled(stream.fileno(), size)


class SourceDigest:
    """The digest of the weight files of one model, as they are when this object is created.

    records: directory for the recorded digests.
    threads: the number of threads that hash the files.
    begin: a function that each of these threads calls first.
    mmproj: a further file of the model, with its tower.

    Raises:
        OSError: a file cannot be read; methods raise it if a file has changed meanwhile.
    """

    def __init__(
        self,
        path: Path,
        records: Path,
        threads: int = 1,
        begin: Callable[[], None] | None = None,
        mmproj: str | None = None,
    ) -> None:
        self._files = weight_files(path, mmproj)
        paths = [path, *([] if mmproj is None else [Path(mmproj)])]
        named = b"\0".join(os.fsencode(each.absolute()) for each in paths)
        name = hashlib.sha256(named).hexdigest()[:24]
        self._record = records / f"{name}.source.json"
        self._threads = threads
        self._begin = begin
        self._seen = [_identity(file) for file in self._files]

    def known(self) -> str | None:
        """Return the digest if it is known without reading the weights; otherwise None."""
        if self._files and all(map(_hub_digest, self._files)):
            return _combined([_hub_digest(file) or "" for file in self._files])
        try:
            record = json.loads(self._record.read_text())
            if record["files"] == self._identified():
                return str(record["digest"])
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return None

    def compute(self, stopped: Callable[[], bool] = lambda: False) -> str:
        """Return the digest; if it is not known, read the content and record the digest.

        Raises:
            OSError: a file cannot be read, changes meanwhile, or `stopped()` has returned True.
        """
        known = self.known()
        if known is not None:
            return known
        started = time.time_ns()
        with ThreadPoolExecutor(self._threads, initializer=self._begin) as pool:
            digest = _combined(
                [_hub_digest(f) or _tree_digest(f, pool, stopped) for f in self._files]
            )
        self.check_unchanged()
        latest = max((max(times) for *_, times in self._seen), default=0)
        if started - latest > SETTLED_NS:
            # Without a recorded digest, the next start reads the content again.
            with suppress(OSError):
                self._write(digest)
        return digest

    def check_unchanged(self) -> None:
        """Raise an OSError if a file has changed since this object was created."""
        if self._seen != [_identity(file) for file in self._files]:
            msg = "the model's files change while they are read"
            raise OSError(msg)

    def _identified(self) -> list[object]:
        fault("source.sample")
        return [
            [*seen[:-1], list(seen[-1]), samples_of(file, seen[3])]
            for file, seen in zip(self._files, self._seen, strict=True)
        ]

    def _write(self, digest: str) -> None:
        text = json.dumps({"files": self._identified(), "digest": digest})
        self._record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fault("source.write")
        replace_file(self._record, text.encode())


def _identity(file: Path) -> tuple[str, int, int, int, tuple[int, int]]:
    status = file.stat()
    times = (status.st_mtime_ns, status.st_ctime_ns)
    return file.name, status.st_dev, status.st_ino, status.st_size, times


def _hub_digest(file: Path) -> str | None:
    """Return the SHA-256 in the name of a file in the hub's cache; None for another file."""
    found = file.resolve()
    named = found.parent.name == "blobs" and _SHA256.fullmatch(found.name)
    return f"sha256:{found.name}" if named else None


def _tree_digest(file: Path, pool: ThreadPoolExecutor, stopped: Callable[[], bool]) -> str:
    """Return a hash of the hashes of a file's parts; threads compute these."""
    size = file.stat().st_size
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)

    def part(offset: int) -> bytes:
        if stopped():
            msg = "stopped"
            raise OSError(msg)
        fault("source.read")
        return hashlib.sha256(os.pread(fd, PART_BYTES, offset)).digest()

    try:
        parts = list(pool.map(part, range(0, size, PART_BYTES)))
    finally:
        os.close(fd)
    return f"tree:{hashlib.sha256(b''.join(parts)).hexdigest()}"


def _combined(digests: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()
