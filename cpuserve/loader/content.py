"""Whether an open file still has its content: by its size, its times, and samples of its bytes."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from cpuserve.base.errors import SourceChanged
from cpuserve.base.fault_points import fault

# Half a mebibyte of each file is read; if the file is in memory, this takes less than 1 ms.
SAMPLES, SAMPLE_BYTES = 32, 16 << 10


def sampled(fd: int, size: int) -> str:
    """Return a hash of samples that are spread evenly over the file `fd` of `size` bytes.

    Each layer has some samples, because a fine-tune may leave most layers unchanged.
    """
    hashed, last = hashlib.sha256(), max(0, size - SAMPLE_BYTES)
    for index in range(SAMPLES + 1):
        os.lseek(fd, last * index // SAMPLES, os.SEEK_SET)  # Windows has no pread
        hashed.update(os.read(fd, SAMPLE_BYTES))
    return hashed.hexdigest()


class ContentCheck:
    """Notices that an open file, which an engine reads while it runs, gets other content.

    A file that another one replaces by a rename keeps its content. A file with a new time of
    change has its content still if its samples are the same: a change between two samples is not
    noticed. Programs can restore the first of the two times (`cp -p`), and not the second.
    """

    def __init__(self, fd: int, path: Path) -> None:
        self._fd, self._path = fd, path
        self._seen = self._state()
        self._samples = self._sampled(self._seen[0])

    def __call__(self) -> None:
        """Raise SourceChanged if the file has other content now; takes 1 us if it has not."""
        now = self._state()
        if now == self._seen:
            return
        # One may not read a mapped page behind the end of its file, so a shorter file is not read.
        if now[0] == self._seen[0] and self._sampled(now[0]) == self._samples:
            self._seen = now
            return
        msg = (
            f"the file {self._path.name} (in {self._path.parent}) was changed while the engine "
            "reads it, so the engine ends: start cpuserve again to load the new content"
        )
        raise SourceChanged(msg)

    def _sampled(self, size: int) -> str:
        fault("mapped.sample")
        return sampled(self._fd, size)

    def _state(self) -> tuple[int, int, int]:
        found = os.fstat(self._fd)
        return found.st_size, found.st_mtime_ns, found.st_ctime_ns
