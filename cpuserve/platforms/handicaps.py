"""Conditions of a host that slow down every model, and their remedies.

`serve` prints the conditions as notes, and `doctor` lists them with its other problems.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from cpuserve.platforms.host import Host
from cpuserve.platforms.isa_level import default_level, missing_level

TORCH_REMEDY = "pip install 'cpuserve[torch]'"
# For an installation from source: this compiles the levels that the CPU of the machine runs.
BUILD_HERE = (
    "in the source of cpuserve, run: "
    "CPUSERVE_LEVELS=native pip install --force-reinstall --no-deps ."
)


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
        yield Handicap(host.native_error, f"reinstall cpuserve on this machine: {BUILD_HERE}")
    elif missing_level(host) or not host.isa_levels:
        yield Handicap(_lacking(host), BUILD_HERE)
    elif default_level(host) == "scalar":
        what = "this CPU has neither AVX2 nor NEON, so models run without vector instructions"
        yield Handicap(what, "use a CPU with AVX2 (since 2013), which is many times faster")
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


def no_level(host: Host) -> str:
    """Return the text that says that the extension has no ISA level for this CPU."""
    built = ", ".join(host.built_levels) or "none"
    return f"this build has no ISA level that this CPU runs (it has: {built})"


def _lacking(host: Host) -> str:
    """Return the text about the ISA level that this build lacks."""
    if not host.isa_levels:
        return no_level(host)
    built = ", ".join(host.built_levels)
    return f"this CPU could run the ISA level {missing_level(host)}, but this build has: {built}"
