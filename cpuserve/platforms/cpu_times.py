"""The time that each CPU of this machine was busy and idle since the machine started."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec

from cpuserve.base.fault_points import fault

_STAT = Path("/proc/stat")
# The fields are user, nice, system, idle, iowait, irq, softirq, steal.
# Guest times are included in user and nice.
_LINE = re.compile(r"^cpu(\d+) ((?:\d+ ?){4,})", re.MULTILINE)
_COUNTED = 8
_IDLE = (3, 4)


class CpuTimes(msgspec.Struct, frozen=True):
    """The seconds that CPU `cpu` was busy and idle since the machine started."""

    cpu: int
    busy_s: float
    idle_s: float


def cpu_times(stat: Path = _STAT) -> list[CpuTimes]:
    """Return the times of each CPU that is online, from `stat` (/proc/stat) or else from psutil."""
    try:
        fault("system.read")
        text = stat.read_text(encoding="ascii")
    except OSError:
        return _from_psutil()
    tick = 1 / os.sysconf("SC_CLK_TCK")
    found = []
    for number, times in _LINE.findall(text):
        values = [int(value) * tick for value in times.split()[:_COUNTED]]
        idle = sum(values[i] for i in _IDLE if i < len(values))
        found.append(CpuTimes(int(number), round(sum(values) - idle, 3), round(idle, 3)))
    return found


def _from_psutil() -> list[CpuTimes]:
    import psutil  # psutil is imported here, because systems with /proc do not need it

    times = psutil.cpu_times(percpu=True)
    return [CpuTimes(i, round(sum(t) - t.idle, 3), round(t.idle, 3)) for i, t in enumerate(times)]
