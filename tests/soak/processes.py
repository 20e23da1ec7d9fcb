"""What the processes of a server have: memory, descriptors, threads, shared memory."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import psutil

FRONT_END, TEMPLATES = "front end", "templates"
ROLES = {
    "cpuserve.engine.child": "engine",
    "cpuserve.engine.grammars": "grammars",
    "cpuserve.tokenizer.rendering": TEMPLATES,
}


@dataclass(frozen=True, slots=True)
class Held:
    """The sums of all processes of a server.

    rss: bytes of memory, without pages of files, which other programs share as well. A page that
      processes share counts once, with a part in each of them: a fork lives for a moment, and has
      all pages of its parent.
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
            each = (memory(process), process.num_fds(), process.num_threads(), 1, shm)
            found = [sum(pair) for pair in zip(found, each, strict=True)]
    return Held(*found)


def resident(pid: int) -> Counter[str]:
    """Return the bytes of memory of the process `pid` and of all below it, by role.

    Processes that render are forks that stay. With each page of their parent that they write to,
    they come to have a copy, for hours: so all pages that they have count, copies or not.
    """
    root = psutil.Process(pid)
    found: Counter[str] = Counter()
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            line = " ".join(process.cmdline())
            role = next((role for module, role in ROLES.items() if module in line), FRONT_END)
            found[role] += memory(process, shares=role != TEMPLATES)
    return found


def memory(process: psutil.Process, *, shares: bool = True) -> int:
    """Return the bytes of memory of a process, with its part of the pages that it shares.

    shares: False = with all of these pages.
    """
    told = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    kinds = "Pss_(?:Anon|Shmem)" if shares else "Anonymous"
    return sum(int(size) << 10 for size in re.findall(rf"^{kinds}: +(\d+)", told, re.M))


@dataclass(frozen=True, slots=True)
class Slope:
    """The change of a figure in an hour, its standard error, and the first and the last value.

    The error takes into account that a sample tells little more than the one before it.
    """

    name: str
    an_hour: float
    error: float
    first: float
    last: float


def slopes(samples: Sequence[tuple[float, Held]]) -> list[Slope]:
    """Return the slope of each figure; samples: seconds, and what the server had then."""
    times = [at for at, _ in samples]
    rows = zip(*(astuple(each) for _, each in samples), strict=True)
    return [slope(name, times, list(row)) for name, row in zip(NAMES, rows, strict=True)]


def slopes_of_roles(times: Sequence[float], samples: Sequence[Mapping[str, int]]) -> list[Slope]:
    """Return the slope of the memory of each role; times: seconds."""
    roles = (FRONT_END, *ROLES.values())
    return [slope(role, times, [each.get(role, 0) for each in samples]) for role in roles]


def slope(name: str, times: Sequence[float], values: Sequence[float]) -> Slope:
    """Return the line with the least squares, for at least three times (in s) that differ."""
    count = len(times)
    times = [at / 3600 for at in times]
    middle, mean = sum(times) / count, sum(values) / count
    spread = sum((t - middle) ** 2 for t in times)
    rise = sum((t - middle) * v for t, v in zip(times, values, strict=True)) / spread
    rest = [v - mean - rise * (t - middle) for t, v in zip(times, values, strict=True)]
    squares = sum(each**2 for each in rest)
    # Samples whose rests follow each other count as fewer: those of a process of first order.
    follow = sum(a * b for a, b in itertools.pairwise(rest)) / squares if squares else 0.0
    follow = min(max(follow, 0.0), 1 - 2 / count)
    error = math.sqrt(squares / (count - 2) / spread * (1 + follow) / (1 - follow))
    return Slope(name, rise, error, values[0], values[-1])
