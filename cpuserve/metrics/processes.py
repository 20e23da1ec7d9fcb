"""The figures of all processes of the server: this process and its descendants, by role.

Reading /proc takes milliseconds, and the pages of a large process more: any thread may read, and
a result is kept so long that reading takes at most a twentieth of one CPU.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from cpuserve.base.fault_points import fault

if TYPE_CHECKING:
    import psutil

PROC = Path("/proc")
FRONT_END, OTHER = "front_end", "other"
_HUGE = ("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped", "Shared_Hugetlb", "Private_Hugetlb")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReadingPace:
    """How often the figures are read again.

    processes_s, pages_s: the least seconds between two readings of the processes, and of the pages
      of their memory.
    rest: a reading that takes t seconds is kept for rest * t seconds at least.
    """

    processes_s: float = 1.0
    pages_s: float = 15.0
    rest: float = 20.0


@dataclass(slots=True)
class RoleFigures:
    """The processes of one role now.

    cpu_s: CPU seconds; processes of this role that have ended count too.
    started: when the newest of them started, in seconds since 1970.
    open_files, max_files: of the process with the most open files; max_files 0 = unknown.
    """

    number: int = 0
    cpu_s: float = 0.0
    resident: int = 0
    virtual: int = 0
    started: float = 0.0
    open_files: int = 0
    max_files: int = 0


@dataclass(slots=True)
class PageFigures:
    """Where the memory of the processes is: bytes by role, and by role and NUMA node."""

    huge: dict[str, int] = field(default_factory=dict)
    nodes: dict[tuple[str, str], int] = field(default_factory=dict)


class _Reading(Generic[T]):
    """The result of a function, which is called again when the result is too old."""

    def __init__(self, read: Callable[[], T], fresh_s: float, rest: float) -> None:
        self._read = read
        self._fresh_s = fresh_s
        self._rest = rest
        self._until = 0.0
        self._value: T | None = None

    def get(self, clock: Callable[[], float] = time.monotonic) -> T:
        begun = clock()
        if self._value is None or begun >= self._until:
            self._value = self._read()
            now = clock()
            self._until = now + max(self._fresh_s, self._rest * (now - begun))
        return self._value


class Processes:
    """Reads the processes of the server; for any thread.

    roles: the role of a process by a text in its command; others have the role "other".
    """

    def __init__(self, roles: Mapping[str, str], pace: ReadingPace | None = None) -> None:
        pace = pace or ReadingPace()
        self._roles = roles
        self._lock = Lock()
        self._figures = _Reading(self._read, pace.processes_s, pace.rest)
        self._pages = _Reading(self._read_pages, pace.pages_s, pace.rest)
        # Of each process that ran at the last reading: its role, and its CPU seconds.
        self._known: dict[psutil.Process, tuple[str, float]] = {}
        self._ended_s: defaultdict[str, float] = defaultdict(float)

    def families(self) -> list[Metric]:
        """Return the metrics of all processes."""
        with self._lock:
            figures, pages = self._figures.get(), self._pages.get()
        return [*process_families(figures), *page_families(pages)]

    def _read(self) -> dict[str, RoleFigures]:
        import psutil

        this = psutil.Process()
        running = [this, *this.children(recursive=True)]
        figures: defaultdict[str, RoleFigures] = defaultdict(RoleFigures)
        known: dict[psutil.Process, tuple[str, float]] = {}
        for process in running:
            role, cpu_s = self._known.get(process, ("", 0.0))
            # A process may end now, and its parent may not have waited for it yet.
            with suppress(psutil.Error, OSError), process.oneshot():
                role = role or (FRONT_END if process == this else self._role(process))
                _add(figures[role], process)
                cpu_s = sum(process.cpu_times()[:2])
            if role:
                known[process] = role, cpu_s
        for process, (role, cpu_s) in self._known.items():
            if process not in known:
                self._ended_s[role] += cpu_s
        self._known = known
        for role, seconds in (*known.values(), *self._ended_s.items()):
            figures[role].cpu_s += seconds
        return figures

    def _role(self, process: psutil.Process) -> str:
        command = " ".join(process.cmdline())
        return next((role for text, role in self._roles.items() if text in command), OTHER)

    def _read_pages(self) -> PageFigures:
        pages = PageFigures()
        for process, (role, _) in self._known.items():
            folder = PROC / str(process.pid)
            with suppress(OSError, ValueError):  # it has ended, or the system has no such file
                fault("system.read")
                huge = huge_bytes((folder / "smaps_rollup").read_text())
                pages.huge[role] = pages.huge.get(role, 0) + huge
            with suppress(OSError, ValueError):
                lines = (folder / "numa_maps").read_text().splitlines()
                for node, size in node_bytes(lines).items():
                    key = role, node
                    pages.nodes[key] = pages.nodes.get(key, 0) + size
        return pages


def _add(figures: RoleFigures, process: psutil.Process) -> None:
    """Add a process to the figures of its role, except for its CPU time.

    Raises:
        psutil.Error: the process has ended, or may not be read; nothing was added.
    """
    import psutil

    memory, started, files = process.memory_info(), process.create_time(), process.num_fds()
    # macOS shows no limits of other processes.
    limit = process.rlimit(psutil.RLIMIT_NOFILE)[0] if hasattr(process, "rlimit") else 0
    figures.number += 1
    figures.resident += memory.rss
    figures.virtual += memory.vms
    figures.started = max(figures.started, started)
    if files >= figures.open_files:
        figures.open_files, figures.max_files = files, limit


def huge_bytes(rollup: str) -> int:
    """Return the bytes in huge pages, from the text of /proc/PID/smaps_rollup."""
    found = dict(line.split(":", 1) for line in rollup.splitlines()[1:] if ":" in line)
    return sum(int(found[name].split()[0]) for name in _HUGE if name in found) << 10


def node_bytes(lines: Iterable[str]) -> Mapping[str, int]:
    """Return the resident bytes on each NUMA node, from the lines of /proc/PID/numa_maps."""
    total: Counter[str] = Counter()
    for line in lines:
        facts = dict(word.split("=", 1) for word in line.split()[1:] if "=" in word)
        page = int(facts.get("kernelpagesize_kB", "0")) << 10
        for name, count in facts.items():
            if name[0] == "N" and name[1:].isdecimal():
                total[name[1:]] += int(count) * page
    return total


# (metric name, attribute of RoleFigures, help text)
_GAUGES = (
    ("cpuserve:processes", "number", "Processes of the server by role."),
    ("process_resident_memory_bytes", "resident", "Resident memory; forks count shared pages too."),
    ("process_virtual_memory_bytes", "virtual", "Virtual memory."),
    ("process_start_time_seconds", "started", "When the newest process of a role started."),
    ("process_open_fds", "open_files", "Open files of the process of a role with the most."),
    ("process_max_fds", "max_files", "How many files that process may open."),
)


def process_families(figures: Mapping[str, RoleFigures]) -> Iterable[Metric]:
    """Yield the metrics of processes from the figures of each role."""
    cpu = CounterMetricFamily(
        "process_cpu_seconds", "CPU time of the processes of a role.", labels=["role"]
    )
    for role, found in figures.items():
        cpu.add_metric([role], found.cpu_s)
    yield cpu
    for name, attribute, text in _GAUGES:
        family = GaugeMetricFamily(name, text, labels=["role"])
        for role, found in figures.items():
            if found.number and (attribute != "max_files" or found.max_files):
                family.add_metric([role], getattr(found, attribute))
        yield family


def page_families(pages: PageFigures) -> Iterable[Metric]:
    """Yield the metrics of pages that the system reports: macOS reports none."""
    huge = GaugeMetricFamily(
        "cpuserve:huge_page_bytes", "Memory in huge pages by role.", labels=["role"]
    )
    for role, size in pages.huge.items():
        huge.add_metric([role], size)
    nodes = GaugeMetricFamily(
        "cpuserve:numa_memory_bytes",
        "Resident memory by role and NUMA node.",
        labels=["role", "node"],
    )
    for (role, node), size in pages.nodes.items():
        nodes.add_metric([role, node], size)
    yield from (family for family in (huge, nodes) if family.samples)
