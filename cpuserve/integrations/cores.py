"""Assigns separate cores to several engines on one machine.

Schedulers such as Ray count CPUs but do not say which ones a process should use.
So each engine locks one file per core, for as long as its process lives.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cpuserve.base.errors import ConfigError
from cpuserve.base.ids import CpuId
from cpuserve.platforms import Host
from cpuserve.platforms.topology import Core, by_node, physical_cores

POLL_S = 0.2


class Claim:
    """The CPUs that this process has claimed, until `release` or the end of the process."""

    def __init__(self, cpus: tuple[CpuId, ...], files: Iterable[int]) -> None:
        self.cpus = cpus
        self._files = list(files)

    def release(self) -> None:
        """Release the cores."""
        while self._files:
            os.close(self._files.pop())


def claim_cores(
    num_cpus: int, host: Host, directory: Path | None = None, wait_s: float = 30.0
) -> Claim:
    """Claim free whole cores that together have at least `num_cpus` logical CPUs.

    The cores are in one NUMA node if a node has enough free ones.
    Waits up to wait_s seconds for other engines to end.

    directory: contains the lock files; the same for all engines.

    Raises:
        ConfigError: after wait_s seconds there are still not enough free cores.
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
                f"are free, running engines use the others; reduce num_cpus or the replicas"
            )
            raise ConfigError(msg)
        time.sleep(POLL_S)


def _try(num_cpus: int, host: Host, directory: Path) -> tuple[int, Claim | None]:
    """Return (number of free CPUs, the claim if they are enough)."""
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
    """Choose cores of the node with the fewest free CPUs that has enough, otherwise of all nodes.

    Returns [] if there are too few.
    """
    nodes = [group for group in by_node(free) if _width(group) >= num_cpus]
    group = min(nodes, key=_width) if nodes else free
    chosen: list[Core] = []
    for core in group:
        if _width(chosen) < num_cpus:
            chosen.append(core)
    return chosen if _width(chosen) >= num_cpus else []


def _width(cores: Sequence[Core]) -> int:
    """Return the number of logical CPUs of `cores`."""
    return sum(len(core.cpus) for core in cores)


def _lock(path: Path) -> int | None:
    """Lock a file; return its descriptor, or None if another process holds the lock."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    return file


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Hold the lock on the directory.

    An engine locks all free cores while it chooses. Without this lock, an engine that chooses
    at the same time would see all of these cores as claimed.
    """
    file = os.open(directory / "all", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)
