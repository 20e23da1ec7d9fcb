"""A disk that takes no more bytes, for tests without the rights to mount a small one."""

import resource
from contextlib import contextmanager


@contextmanager
def full_disk(pid=0):
    """Every write to a file by process `pid` (0 = this one) fails, as on a full disk (EFBIG)."""
    limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
