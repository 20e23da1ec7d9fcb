"""Cores for one of several engines on a machine that nobody else hands out.

Schedulers such as Ray count CPUs and do not say which. So each engine locks a file per core, for as
long as its process lives.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cpuserve.errors import ConfigError
from cpuserve.ids import CpuId
from cpuserve.platforms import Host
from cpuserve.platforms.topology import Core, by_node, physical_cores

POLL_S = 0.2


class Claim:
    """The CPUs this process has; `release` or the end of the process gives them back."""

    def __init__(self, cpus: tuple[CpuId, ...], files: Iterable[int]) -> None:
        self.cpus = cpus
        self._files = list(files)

    def release(self) -> None:
        """Give the cores back."""
        while self._files:
            os.close(self._files.pop())


def claim_cores(
    num_cpus: int, host: Host, directory: Path | None = None, wait_s: float = 30.0
) -> Claim:
    """Whole cores with `num_cpus` logical CPUs or more that no other engine has claimed.

    Of one memory node where one has enough. directory: of the locks, the same for all engines of
    the machine. Waits for engines that are just ending.

    Raises:
        ConfigError: after wait_s there are still not enough.
    """
    directory = directory or Path(tempfile.gettempdir()) / f"cpuserve-cores-{os.getuid()}"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    end = time.monotonic() + wait_s
    while True:
        free, claim = _try(num_cpus, host, directory)
        if claim is not None:
            return claim
        if time.monotonic() >= end:
            msg = (
                f"num_cpus={num_cpus}: {free} of the {len(host.usable_cpus)} CPUs of this machine "
                f"are free, the others belong to engines that run; ask for fewer CPUs or replicas"
            )
            raise ConfigError(msg)
        time.sleep(POLL_S)


def _try(num_cpus: int, host: Host, directory: Path) -> tuple[int, Claim | None]:
    """(CPUs that are free, the claim if they are enough)."""
    with _alone(directory):
        locks = {core: _lock(directory / f"core-{core.cpu}") for core in physical_cores(host)}
        free = [core for core, file in locks.items() if file is not None]
        chosen = _choose(free, num_cpus)
        kept = []
        for core, file in locks.items():
            if file is not None and core in chosen:
                kept.append(file)
            elif file is not None:
                os.close(file)
    cpus = tuple(sorted(cpu for core in chosen for cpu in core.cpus))
    return _width(free), Claim(cpus, kept) if chosen else None


def _choose(free: Sequence[Core], num_cpus: int) -> list[Core]:
    """The first cores of the fullest node that still has enough, else of all; [] if too few."""
    nodes = [group for group in by_node(free) if _width(group) >= num_cpus]
    group = min(nodes, key=_width) if nodes else free
    chosen: list[Core] = []
    for core in group:
        if _width(chosen) < num_cpus:
            chosen.append(core)
    return chosen if _width(chosen) >= num_cpus else []


def _width(cores: Sequence[Core]) -> int:
    """Logical CPUs."""
    return sum(len(core.cpus) for core in cores)


def _lock(path: Path) -> int | None:
    """A descriptor that holds the lock, or None if another has it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    return file


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Two engines that look at the same time would each see cores the other only tries."""
    file = os.open(directory / "all", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)
