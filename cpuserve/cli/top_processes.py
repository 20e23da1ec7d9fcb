"""Find the programs that use the most CPU time now."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

WINDOW_S = 0.3
LEAST = 0.1  # programs that use less than 0.1 CPUs are not listed
MOST = 3


@dataclass(frozen=True, slots=True)
class BusyProcess:
    """A process: its name without arguments, which may be secret, and how many CPUs it uses."""

    pid: int
    name: str
    cpus: float


def busiest(proc_root: Path = Path("/proc"), window_s: float = WINDOW_S) -> list[BusyProcess]:
    """Return the other processes that used the most CPU time during `window_s`, busiest first."""
    before, start = _times(proc_root), time.monotonic()
    time.sleep(window_s)
    after, elapsed = _times(proc_root), time.monotonic() - start
    tick = os.sysconf("SC_CLK_TCK")
    used = [
        BusyProcess(pid, name, (ticks - before[pid][1]) / tick / elapsed)
        for pid, (name, ticks) in after.items()
        if pid in before and pid != os.getpid()
    ]
    busy = [program for program in used if program.cpus >= LEAST]
    return sorted(busy, key=lambda program: -program.cpus)[:MOST]


def _times(proc_root: Path) -> dict[int, tuple[str, int]]:
    """Return {pid: (name, clock ticks of CPU time)} of all visible processes."""
    found = {}
    for entry in proc_root.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:  # the process has ended meanwhile
            continue
        # The name may contain spaces and brackets, but the fields after its last bracket do not.
        head, _, tail = text.rpartition(")")
        name, fields = head.partition("(")[2], tail.split()
        found[int(entry.name)] = name, int(fields[11]) + int(fields[12])
    return found
