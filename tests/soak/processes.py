"""What the processes of a server have: memory, descriptors, threads, shared memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class Held:
    """The sums of all processes of a server.

    rss: bytes of memory; pages that processes share count in each of them.
    shm: mappings of files in memory (/dev/shm, memfd).
    """

    rss: int
    fds: int
    threads: int
    processes: int
    shm: int


NAMES = tuple(field.name for field in fields(Held))


def held(pid: int) -> Held:
    """Return what the process `pid` and all below it have now."""
    root = psutil.Process(pid)
    found = [0] * len(NAMES)
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            shm = sum("/dev/shm/" in line or "/memfd:" in line for line in maps.splitlines())
            memory, fds, threads = (
                process.memory_info().rss,
                process.num_fds(),
                process.num_threads(),
            )
            each = (memory, fds, threads, 1, shm)
            found = [sum(pair) for pair in zip(found, each, strict=True)]
    return Held(*found)


@dataclass(frozen=True, slots=True)
class Slope:
    """The change of a figure in an hour, its standard error, and the first and the last value."""

    name: str
    an_hour: float
    error: float
    first: float
    last: float


def slopes(samples: Sequence[tuple[float, Held]]) -> list[Slope]:
    """Return the slope of each figure; samples: seconds, and what the server had then."""
    times = [at / 3600 for at, _ in samples]
    rows = zip(*(astuple(each) for _, each in samples), strict=True)
    return [_slope(name, times, list(row)) for name, row in zip(NAMES, rows, strict=True)]


def _slope(name: str, times: Sequence[float], values: Sequence[float]) -> Slope:
    """Return the line with the least squares, for at least three times that differ."""
    count = len(times)
    middle, mean = sum(times) / count, sum(values) / count
    spread = sum((t - middle) ** 2 for t in times)
    slope = sum((t - middle) * v for t, v in zip(times, values, strict=True)) / spread
    rest = sum((v - mean - slope * (t - middle)) ** 2 for t, v in zip(times, values, strict=True))
    error = math.sqrt(rest / (count - 2) / spread)
    return Slope(name, slope, error, values[0], values[-1])
