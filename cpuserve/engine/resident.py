"""How much memory this process has resident, now and at most."""

from __future__ import annotations

import resource
from pathlib import Path

STATUS = Path("/proc/self/status")


def resident_bytes(status: Path = STATUS) -> tuple[int, int]:
    """(now, at most so far); now is 0 where the system does not tell.

    Not getrusage where /proc has it: its maximum counts what the process was before it became this
    program, which is its parent's memory.
    """
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = dict(line.split(":", 1) for line in lines if ":" in line)
    now, most = (int(found.get(name, "0").split()[0]) for name in ("VmRSS", "VmHWM"))
    return now * 1024, most * 1024
