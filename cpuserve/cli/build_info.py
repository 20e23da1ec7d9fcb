"""The text of `cpuserve --version`: the version, and facts about the build of the kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cpuserve.platforms.cpu import CpuPlatform
from cpuserve.version import version


def render() -> str:
    """Return the version text of this installation."""
    return text(version(), *CpuPlatform().build())


def text(version: str, levels: Sequence[str], facts: Mapping[str, str], error: str) -> str:
    """Return the output of --version; CpuPlatform.build returns all arguments but the first."""
    lines = [f"cpuserve {version}"]
    if error:
        return "\n".join([*lines, f"  kernels   none: {error}"])
    built = f"{facts['compiler']} ({facts['build_type']}), {facts['c_library']}"
    return "\n".join(
        [
            *lines,
            f"  levels    {', '.join(levels)} (CPUSERVE_LEVELS={facts['levels']})",
            f"  built     for {facts['arch']} and Python {facts['python']}, with {built}",
            f"  baseline  {facts['baseline']} outside the kernels",
        ]
    )
