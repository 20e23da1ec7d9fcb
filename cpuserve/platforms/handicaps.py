"""Conditions of a host that slow down every model, and their remedies.

`serve` prints the conditions as notes, and `doctor` lists them with its other problems.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from cpuserve.platforms.host import Host

TORCH_REMEDY = "pip install 'cpuserve[torch]'"


class Handicap(NamedTuple):
    """A condition that slows models down, and a text that says what to do about it."""

    what: str
    remedy: str


def handicaps(host: Host) -> Iterator[Handicap]:
    """Yield the conditions that slow models down on `host`, the worst condition first."""
    if host.emulated:
        yield Handicap(
            f"this process is emulated ({host.emulated}), which makes models many times slower",
            "use the package or image for this machine (docker run --platform)",
        )
    if host.native_error:
        remedy = "reinstall cpuserve on this machine (pip install --force-reinstall cpuserve)"
        yield Handicap(host.native_error, remedy)
    elif not [level for level in host.isa_levels if level != "scalar"]:
        remedy = "use a CPU with AVX2 or NEON"
        remedy += "; torch is several times slower" if host.torch else f", or torch: {TORCH_REMEDY}"
        what = "this CPU supports none of the ISA levels that the kernels are compiled for"
        yield Handicap(what, remedy)
    if host.tiles_refused:
        yield Handicap(
            "the CPU has AMX, but the system does not let this process use it, which makes prompts "
            "slower",
            "use Linux 5.16 or newer, and a sandbox that permits arch_prctl(ARCH_REQ_XCOMP_PERM)",
        )
    if not host.topology_known:
        yield Handicap(
            "/sys does not list the CPUs, so cores, caches and NUMA nodes are unknown, and every "
            "CPU counts as a core of its own",
            "mount /sys, or bind one CPU of each core with CPUSERVE_OMP_THREADS_BIND",
        )
