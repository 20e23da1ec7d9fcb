"""The resident memory of this process: its current size, and its maximum so far."""

from __future__ import annotations

import resource
from pathlib import Path

from cpuserve.base.fault_points import fault

STATUS = Path("/proc/self/status")


def resident_bytes(status: Path = STATUS) -> tuple[int, int]:
    """Return (current bytes, maximum bytes so far); current is 0 if the system does not report it.

    /proc is preferred, because the maximum of getrusage includes the memory of the parent
    before this process executed its own program.
    """
    try:
        fault("system.read")
        lines = status.read_text().splitlines()
    except OSError:
        return 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = dict(line.split(":", 1) for line in lines if ":" in line)
    now, most = (int(found.get(name, "0").split()[0]) for name in ("VmRSS", "VmHWM"))
    return now * 1024, most * 1024
