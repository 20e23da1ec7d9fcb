"""Lets calls of the system fail in a process of cpuserve (cpuserve/base/fault_points.py).

Python imports this module at the start of a process whose PYTHONPATH has this folder, and so in all
processes that such a process starts. CPUSERVE_FAULT says what fails:

POINT:N:ACTION   the N-th call at the point, in each process
FOLDER           the N-th call at a point from now on, in the process that gets there first, while
                 FOLDER has a file with the name of the point and the text N:ACTION. Its name
                 gets the ending .fired

CPUSERVE_FAULT_DELAY_S says how many seconds the action "delay" takes.
"""

import errno
import os
import signal
import time
from pathlib import Path

from cpuserve.base.fault_points import DELAY, KILL, SHORT, VARIABLE, install

DELAY_S = float(os.environ.get("CPUSERVE_FAULT_DELAY_S", "0.3"))


def act(action, size):
    """Fail in this way, or return the bytes that the call takes."""
    if action == KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    if action == DELAY:
        time.sleep(DELAY_S)
        return size
    if action == SHORT:
        return size // 2
    number = getattr(errno, action)
    raise OSError(number, f"{os.strerror(number)} (on purpose)")


class Plan:
    """POINT:N:ACTION."""

    def __init__(self, text):
        self.point, number, self.action = text.split(":")
        self.left = int(number)

    def __call__(self, point, size):
        if point != self.point:
            return size
        self.left -= 1
        return size if self.left else act(self.action, size)


class Plans:
    """FOLDER."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.counts = {}

    def __call__(self, point, size):
        plan = self.folder / point
        try:
            number, action = plan.read_text(encoding="ascii").split(":")
        except FileNotFoundError:
            self.counts.pop(point, None)
            return size
        self.counts[point] = self.counts.get(point, 0) + 1
        if self.counts[point] < int(number):
            return size
        try:
            plan.rename(plan.with_name(f"{point}.fired"))
        except FileNotFoundError:  # another process was first
            return size
        return act(action, size)


if wanted := os.environ.get(VARIABLE):
    install(Plans(wanted) if os.path.isdir(wanted) else Plan(wanted))  # noqa: PTH112
