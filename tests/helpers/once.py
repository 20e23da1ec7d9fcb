"""A fault point that fails once in this process, as `fault_points._hook` of a test."""

import errno
import os

from cpuserve.base.fault_points import POINTS, SHORT


class Once:
    """fired: whether the call at the point has failed."""

    def __init__(self, point, action):
        assert action in POINTS[point].actions
        self.point, self.action, self.fired = point, action, False

    def __call__(self, point, size):
        if self.fired or point != self.point:
            return size
        self.fired = True
        if self.action == SHORT:
            return size // 2
        number = getattr(errno, self.action)
        raise OSError(number, os.strerror(number))
