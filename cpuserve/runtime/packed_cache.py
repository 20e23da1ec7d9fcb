"""Files with packed weights: a later start reads or maps such a file instead of packing again.

If the weights were quantized while loading, the arenas (the memory with the packed matrices)
are written to a file during the first steps, and the next start reads it.
With --weights-on-disk, the matrices are packed into such a file and mapped.
When memory is short, the system drops pages of the mapped file, and reads them again later.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from mmap import PAGESIZE
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np

from cpuserve.base.affinity import move_to
from cpuserve.base.errors import ModelError
from cpuserve.base.fault_points import fault
from cpuserve.base.log import get_logger
from cpuserve.base.version import version
from cpuserve.config.env import cache_dir
from cpuserve.config.values import format_bytes
from cpuserve.loader.content import ContentCheck
from cpuserve.loader.load import read_config
from cpuserve.loader.packed_files import FOLDER, HEADER_BYTES, PackedFile, PackedFiles, keep_use
from cpuserve.loader.source_digest import SourceDigest
from cpuserve.runtime.expert_memory import ExpertHeat

if TYPE_CHECKING:
    import numpy.typing as npt

    from cpuserve.config.engine import EngineConfig
    from cpuserve.program.lower import Lowered

# Fewer bytes are not kept in a file, because packing them takes less than 0.1 seconds.
LEAST_BYTES = 64 << 20
WRITE_BYTES = 8 << 20
PROBE_S, PROBE_THREADS, PROBE_MOST_BYTES = 0.25, 8, 1 << 22
# A file that cannot be used is made anew; so many times in one start, as a disk may err twice.
MOST_UNUSABLE = 2
_HUGE_PAGE = 1 << 21

log = get_logger("loader")


class Packed(Protocol):
    """The packed matrices of a native executor, with methods of _C.Executor."""

    @property
    def packed_digest(self) -> int:
        """Return the digest of all matrices that have been packed or read."""

    @property
    def packed_arenas(self) -> list[npt.NDArray[np.uint8]]:
        """Return the arena (the memory with packed matrices) of each rank."""

    def read_packed(self, fd: int, offset: int = 0) -> None:
        """Fill the arenas from a file; RuntimeError if the file cannot be read.

        offset: where the HEADER_BYTES before the arenas begin in the file.
        """

    def seal_packed(self) -> None:
        """Make arenas that are mapped from a file read-only."""


class Native(Packed, Protocol):
    """A native executor, of a text model or of its tower."""

    def skip_digest(self) -> None:
        """Compute no digests of the matrices that are packed."""

    @property
    def memory(self) -> dict[str, int]:
        """Return the bytes of memory for each use."""


P = TypeVar("P", bound=Packed)
N = TypeVar("N", bound=Native)


class PackedParts(Generic[N]):
    """Native executors with packed matrices in one file, one after the other.

    offsets: where the HEADER_BYTES before the arenas of each begin.
    """

    def __init__(self, natives: list[N], offsets: list[int]) -> None:
        self.all = natives
        self._offsets = offsets

    @property
    def packed_digest(self) -> int:
        """Return the digest of the matrices of all executors."""
        return sum(native.packed_digest for native in self.all) % 2**64

    @property
    def packed_arenas(self) -> list[npt.NDArray[np.uint8]]:
        """Return the arenas of all executors, in the order of the file."""
        return [arena for native in self.all for arena in native.packed_arenas]

    def read_packed(self, fd: int, offset: int = 0) -> None:
        """Fill all arenas from a file; RuntimeError if the file cannot be read."""
        for native, own in zip(self.all, self._offsets, strict=True):
            native.read_packed(fd, offset + own)

    def seal_packed(self) -> None:
        """Make arenas that are mapped from a file read-only."""
        for native in self.all:
            native.seal_packed()

    def skip_digest(self) -> None:
        """Compute no digests of the matrices that are packed."""
        for native in self.all:
            native.skip_digest()

    @property
    def memory(self) -> dict[str, int]:
        """Return the bytes of memory of all executors for each use."""
        found = [native.memory for native in self.all]
        return {use: sum(part[use] for part in found) for use in found[0]}


class PackedCache:
    """The files with the packed matrices of one engine. `save` may run on another thread.

    mapped: whether weights are mapped from a file; `map` makes the file if it does not exist.
    config: the settings of the engine, without adapters, because these change packed matrices.
    """

    def __init__(
        self, config: EngineConfig, lowered: Sequence[Lowered], size: int, extension: Path
    ) -> None:
        """lowered: the programs of the matrices in the file, the text model first."""
        self.mapped = config.weights_on_disk
        self._config = config
        self._lowered = lowered[0]
        self._folder = cache_dir() / FOLDER
        layout = layout_digest(config, lowered, extension)
        self._files = PackedFiles(self._folder, config.weight_cache_bytes, layout, size)
        self._file: PackedFile | None = None
        self._stop = threading.Event()
        self._saving = threading.Lock()
        self._packed = 0  # digest of the matrices that `fill` has packed
        self._source: SourceDigest | None = None
        self._rate = 0.0  # bytes/s of the disk, if it was measured
        self.unsaved = False
        self._unusable = 0  # number of files that were there and could not be used
        self.check: ContentCheck | None = None  # of the file, if weights are mapped

    @classmethod
    def of(
        cls, config: EngineConfig, lowered: Sequence[Lowered], size: int, extension: Path
    ) -> PackedCache | None:
        """Return the cache of an engine with a file of `size` bytes; None if it needs no file.

        extension: the file of the compiled extension with the code that packs weights.
        """
        quantized = {config.quantize, config.tower_quantize} != {"none"}
        makes = quantized and size >= LEAST_BYTES
        if config.adapters or config.adapter_slots or not config.weight_cache_bytes:
            return None
        if not (makes or config.weights_on_disk):
            return None
        return cls(config, lowered, size, extension)

    # --- files that are read instead of packing --------------------------------------------------

    def fill(self, native: P, pack: Callable[[P], None]) -> None:
        """Fill the arenas from a file if there is one, else with `pack`; then `save` has work."""
        with suppress(OSError):  # files of the model cannot be read: packing reports this
            if self._files.any():
                file = self._open(self._digest(self._config.threads).compute())
                if file is not None and self._read(native, file):
                    file.close()
                    return
        with suppress(OSError):
            self._source = self._digest(threads=1)  # computed before the files are read
        before = native.packed_digest  # is not 0 after a damaged file was read
        pack(native)
        self._packed = (native.packed_digest - before) % 2**64
        self.unsaved = self._source is not None

    def save(self, native: Packed) -> None:
        """Write the arenas to a file. `close` ends this early; a failure is one line of the log."""
        with self._saving:
            try:
                self._save(native)
            except OSError as error:
                if not self._stop.is_set():
                    log.warning(
                        "the quantized weights are not kept for the next start: %s", _reason(error)
                    )

    def _save(self, native: Packed) -> None:
        assert self._source is not None
        source = self._source.compute(self._stop.is_set)
        file = self._files.create(source, wait=False)
        if file is None:  # another engine writes the same file
            return
        try:
            offset = HEADER_BYTES
            for arena in native.packed_arenas:
                for at in range(0, len(arena), WRITE_BYTES):
                    self._write(file.fd, arena[at : at + WRITE_BYTES].data, offset + at)
                offset += len(arena)
        except BaseException:
            file.discard()
            raise
        self._files.commit(file, source, self._packed)
        log.info("the quantized weights are kept for the next start in %s", file.path)
        file.close()

    def _write(self, fd: int, part: memoryview, offset: int) -> None:
        while part:
            if self._stop.is_set():
                msg = "stopped"
                raise OSError(msg)
            written = os.pwrite(fd, part[: fault("packed.write", len(part))], offset)
            part, offset = part[written:], offset + written

    # --- files that are mapped -------------------------------------------------------------------

    def map(self, create: Callable[[int, bool], P], pack: Callable[[P], None]) -> P:
        """Return an executor with arenas mapped from a file, which is made if it does not exist.

        create(fd, writable) makes an executor, and pack(executor) fills its arenas.

        Raises:
            ModelError: the file cannot be made.
        """
        try:
            return self._map(create, pack)
        except OSError as error:
            msg = (
                f"the weights cannot be mapped from a file in {self._folder}: {_reason(error)}. "
                "Set CPUSERVE_CACHE to a directory with room, or give --weights-on-disk never"
            )
            raise ModelError(msg) from error

    def _map(self, create: Callable[[int, bool], P], pack: Callable[[P], None]) -> P:
        digest = self._digest(self._config.threads)
        source = digest.compute()
        made = False  # whether this engine has written the file
        while True:
            file = self._open(source)
            if file is not None:
                native = create(file.fd, False)
                if self._read(native, file, fresh=made):
                    break
                del native
                continue
            file = self._files.create(source, wait=True)
            if file is None:  # another engine has made the file meanwhile
                continue
            try:
                native = create(file.fd, True)
                pack(native)
                digest.check_unchanged()
            except BaseException:
                file.discard()
                raise
            self._files.commit(file, source, native.packed_digest)
            if self._config.weight_memory_bytes:  # as the next start: experts stay in the file
                del native
                file.close()
                made = True
                continue
            native.seal_packed()
            break
        self._file = file
        if not self._config.weight_memory_bytes:  # a pool compares the digests of experts
            self.check = ContentCheck(file.fd, file.path)
        log.info("%s", self._expectation(file, self.heat))
        if self._config.weight_memory_bytes:
            with suppress(OSError):  # `cpuserve config` then expects that experts are used alike
                keep_use(file.path, self._config.model_path, self._rate)
        return native

    @property
    def heat(self) -> ExpertHeat | None:
        """The record of how often each expert is used; None without a file for it."""
        return None if self._file is None else ExpertHeat(self._file.path.with_suffix(".heat"))

    def _expectation(self, file: PackedFile, heat: ExpertHeat | None) -> str:
        """Return a line on where the weights are, and on the token rate that the disk allows."""
        lowered, size = self._lowered, os.fstat(file.fd).st_size - HEADER_BYTES
        pool = self._config.weight_memory_bytes
        kept = min(size, pool or self._config.page_cache_bytes)
        line = f"the weights are mapped from {file.path} ({format_bytes(size)}); "
        if kept >= size:
            return line + "all of them fit in memory, and are read from the disk once"
        line += f"about {format_bytes(kept)} of them stay in memory. "
        # The weights that every token reads stay in memory.
        # The rest of the `kept` bytes of memory holds experts.
        always = size - lowered.expert_bytes
        share = min(1.0, (size - kept) / lowered.expert_bytes) if lowered.expert_bytes else 1.0
        used = None if heat is None else heat.missed(1 - share)
        share = share if used is None else used
        a_token = max(1.0, lowered.expert_read_bytes * share + max(0, always - kept))
        what = "of experts" if lowered.expert_bytes else "of weights"
        reads = lowered.expert_read_bytes or lowered.read_bytes
        line += f"A token reads {format_bytes(reads)} {what}, about {format_bytes(a_token)} of it "
        piece = min(lowered.expert_matrix_bytes or PROBE_MOST_BYTES, PROBE_MOST_BYTES)
        try:
            rate = disk_rate(file.path, piece)
        except OSError as error:
            return f"{line}from the disk, whose rate cannot be measured: {_reason(error)}"
        self._rate, tokens = rate, rate / a_token
        shown = f"{tokens:.1f}" if tokens < 10 else f"{tokens:.0f}"
        return (
            f"{line}from the disk, which gives {rate / 1e9:.2f} GB/s in pieces of "
            f"{format_bytes(piece)}: expect up to about {shown} tokens/s for one request if "
            f"tokens use {'all experts alike' if used is None else 'experts as they did before'}"
        )

    # --- for both kinds of files ---------------------------------------------------------------

    def close(self) -> None:
        """End `save`, and unlock the file that is in use."""
        self._stop.set()
        with self._saving:
            if self._file is not None:
                self._file.close()

    def _digest(self, threads: int) -> SourceDigest:
        def begin() -> None:
            if threads > 1:
                move_to(self._config.compute_cpus)

        config = self._config
        return SourceDigest(
            Path(config.model_path), self._folder, threads, begin, mmproj=config.mmproj
        )

    def _open(self, source: str) -> PackedFile | None:
        try:
            return self._files.open(source)
        except OSError as error:
            self._make_anew("a file of packed weights is", _reason(error))
            return None

    def _make_anew(self, which: str, why: str) -> None:
        """Log that a file cannot be used.

        Raises:
            OSError: this is one such file too many, so they cannot be replaced.
        """
        self._unusable += 1
        if self._unusable > MOST_UNUSABLE:
            msg = f"the file there can be neither used nor made anew: {why}"
            raise OSError(msg)
        log.warning("%s made anew: %s", which, why)

    def _read(self, native: Packed, file: PackedFile, *, fresh: bool = False) -> bool:
        """Read the matrices (check them if they are mapped); False if the file is damaged.

        fresh: whether the file was just written, so that another one would be as bad.

        Raises:
            OSError: the file is damaged although it is fresh, or one such file too many.
        """
        started = time.perf_counter()
        try:
            fault("packed.load")
            native.read_packed(file.fd)
            intact = native.packed_digest == file.digest
            why = "its content is damaged"
        except (OSError, RuntimeError) as error:
            intact, why = False, str(error)
        if intact:
            seconds = time.perf_counter() - started
            log.info("read packed weights from %s in %.1f s", file.path, seconds)
            return True
        file.discard()
        if fresh:
            msg = f"what was just written there cannot be read back: {why}"
            raise OSError(msg)
        self._make_anew(f"the packed weights in {file.path} are", why)
        return False


def layout_digest(config: EngineConfig, lowered: Sequence[Lowered], extension: Path) -> str:
    """Return a digest of all facts that determine the packed bytes, except the tensors."""
    facts = {
        "version": version(),
        "code": _code_digest(extension),
        "config": read_config(Path(config.model_path), config.mmproj),
        "matrices": [part.native.packed_layout for part in lowered],
        "names": [(m.names, str(m.part)) for part in lowered for m in part.matrices],
        "scheme": (config.quantize, config.tower_quantize),
        "dtype": config.dtype,
        "isa": config.isa,
        "ranks": config.rank_threads if config.tensor_parallel_size > 1 else 1,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def _code_digest(extension: Path) -> str:
    """Return a digest of the code that reads and packs tensors; it replaces a format version."""
    package, hashed = Path(__file__).parents[1], hashlib.sha256()
    for folder in ("loader", "quant", "program"):
        for file in sorted((package / folder).rglob("*.py")):
            hashed.update(file.read_bytes())
    hashed.update(extension.read_bytes())
    return hashed.hexdigest()


def disk_rate(path: Path, piece: int) -> float:
    """Return the bytes per second at which several threads read pieces of `path` from the disk.

    The reads bypass the page cache if the system can do that.

    Raises:
        OSError: the file cannot be read.
    """
    piece = max(PAGESIZE, piece // PAGESIZE * PAGESIZE)
    direct = getattr(os, "O_DIRECT", 0)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | direct)
    except OSError:  # the file system has no O_DIRECT
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if sys.platform == "linux":
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    pieces = max(1, os.fstat(fd).st_size // piece)
    started = time.perf_counter()

    def read(thread: int) -> int:
        total, number, memory = 0, thread, _memory_to_read_into(piece)
        while total == 0 or time.perf_counter() - started < PROBE_S:
            at = int(number * 0.6180339887 % 1 * pieces)  # spreads the pieces over the file
            total += os.preadv(fd, [memory], at * piece)
            number += PROBE_THREADS
        return total

    try:
        with ThreadPoolExecutor(PROBE_THREADS) as pool:
            total = sum(pool.map(read, range(1, PROBE_THREADS + 1)))
    finally:
        os.close(fd)
    return total / (time.perf_counter() - started)


def _memory_to_read_into(size: int) -> memoryview:
    """Return `size` bytes of memory, in huge pages where the system has them, as a pool has.

    Eight threads that read 1 MB at a time past the page cache get 3.8 GB/s from a disk into
    huge pages, and 1.5 GB/s into pages of 4 KiB.
    """
    private = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
    memory = mmap.mmap(-1, size + _HUGE_PAGE, **({"flags": private} if private else {}))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the system has none
            memory.madvise(mmap.MADV_HUGEPAGE)
    everything = np.frombuffer(memory, np.uint8)
    first = -everything.ctypes.data % _HUGE_PAGE
    return everything[first : first + size].data


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
