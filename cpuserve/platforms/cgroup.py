"""The CPU quota and the memory limit of this process's control group: v1, v2 and hybrid.

The limits of all ancestors apply, so every value is the minimum on the path to the root.
In a container, the path in /proc/self/cgroup may not exist below the mounted root (v1 without
a cgroup namespace shows the host's path); the mounted root is then the container's own group.
"No limit" is written as "max" (v2), -1 (quota in v1), or 2^63 rounded to a page (memory in v1).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from cpuserve.base.fault_points import fault

T = TypeVar("T")

V1_UNLIMITED = 1 << 62  # larger limits mean "no limit": the kernel writes 9223372036854771712


class Cgroup(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of the control group.

    cpu_quota: number of CPUs (1.5 = 150 ms of CPU time in each 100 ms).
    memory_limit: the limit in bytes.
    memory_available: the limit minus the used bytes that cannot be reclaimed. None = no limit.
    throttled_periods, throttled_s: how often and for how many seconds the kernel stopped the group,
      or an ancestor, because of its CPU quota.
    """

    version: int = 0
    cpu_quota: float | None = None
    memory_limit: int | None = None
    memory_available: int | None = None
    throttled_periods: int | None = None
    throttled_s: float | None = None


def read_cgroup(cgroup_root: Path, proc_root: Path) -> Cgroup:
    """Read the limits that apply to this process; a missing file means no limit."""
    paths = _own_paths(proc_root / "self" / "cgroup")
    v2_root = next((r for r in (cgroup_root, cgroup_root / "unified") if _is_v2(r)), None)
    quotas: list[float] = []
    memory: list[tuple[int, int]] = []
    throttled: list[int] = []
    stopped: list[float] = []
    if v2_root is not None:
        for group in _ancestors(v2_root, paths.get("", "/")):
            _append(quotas, _v2_quota(group))
            _append(memory, _v2_memory(group))
            _append(throttled, _stat(group / "cpu.stat", "nr_throttled"))
            _append(stopped, _seconds(_stat(group / "cpu.stat", "throttled_usec"), 1e6))
    for group in _v1_groups(cgroup_root, "cpu", paths):
        _append(quotas, _v1_quota(group))
        _append(throttled, _stat(group / "cpu.stat", "nr_throttled"))
        _append(stopped, _seconds(_stat(group / "cpu.stat", "throttled_time"), 1e9))
    for group in _v1_groups(cgroup_root, "memory", paths):
        _append(memory, _v1_memory(group))
    has_v1 = (cgroup_root / "memory").is_dir() or (cgroup_root / "cpu").is_dir()
    return Cgroup(
        version=1 if has_v1 else 2 if v2_root else 0,
        cpu_quota=min(quotas, default=None),
        memory_limit=min((limit for limit, _ in memory), default=None),
        memory_available=min((max(0, free) for _, free in memory), default=None),
        throttled_periods=max(throttled, default=None),
        throttled_s=max(stopped, default=None),
    )


def own_cgroup() -> Cgroup:
    """Read the limits of this process from /sys/fs/cgroup and /proc."""
    return read_cgroup(Path("/sys/fs/cgroup"), Path("/proc"))


def _seconds(count: int | None, per_second: float) -> float | None:
    return None if count is None else count / per_second


def _own_paths(file: Path) -> dict[str, str]:
    """Return controller -> path of this process's group; the key "" is the v2 hierarchy."""
    paths: dict[str, str] = {}
    for line in text_of(file).splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            for controller in parts[1].split(","):
                paths[controller] = parts[2]
    return paths


def _is_v2(root: Path) -> bool:
    return (root / "cgroup.controllers").is_file()


def _v1_groups(root: Path, controller: str, paths: dict[str, str]) -> Iterator[Path]:
    mounts = [p for p in root.glob(f"*{controller}*") if controller in p.name.split(",")]
    if mounts:
        yield from _ancestors(mounts[0], paths.get(controller, "/"))


def _ancestors(root: Path, path: str) -> Iterator[Path]:
    """Yield the own group below `root` if it exists, then its parents; `root` comes last."""
    parts = [p for p in path.split("/") if p]
    if ".." not in parts and (root / "/".join(parts)).is_dir():
        for depth in range(len(parts), 0, -1):
            yield root / "/".join(parts[:depth])
    yield root


def _v2_quota(group: Path) -> float | None:
    words = text_of(group / "cpu.max").split()
    if len(words) != 2 or words[0] == "max" or not all(w.isdigit() for w in words):
        return None
    return _ratio(int(words[0]), int(words[1]))


def _v1_quota(group: Path) -> float | None:
    return _ratio(_int(group / "cpu.cfs_quota_us"), _int(group / "cpu.cfs_period_us"))


def _ratio(quota: int | None, period: int | None) -> float | None:
    if not quota or not period or quota <= 0 or period <= 0:
        return None
    return quota / period


def _v2_memory(group: Path) -> tuple[int, int] | None:
    limits = [_int(group / "memory.max"), _int(group / "memory.high")]
    return _limit_and_free(
        min((x for x in limits if x is not None), default=None),
        _int(group / "memory.current"),
        _reclaimable(group, "inactive_file", "active_file", "slab_reclaimable"),
    )


def _v1_memory(group: Path) -> tuple[int, int] | None:
    # In a container, only memory.stat shows the limits of ancestors.
    of_all = _stat(group / "memory.stat", "hierarchical_memory_limit")
    limits = [_int(group / "memory.limit_in_bytes"), of_all]
    return _limit_and_free(
        min((x for x in limits if x is not None), default=None),
        _int(group / "memory.usage_in_bytes"),
        _reclaimable(group, "total_inactive_file", "total_active_file"),
    )


def _reclaimable(group: Path, *keys: str) -> int:
    """Return the bytes that the kernel can reclaim, such as page cache."""
    return sum(_stat(group / "memory.stat", key) or 0 for key in keys)


def _limit_and_free(
    limit: int | None, usage: int | None, reclaimable: int
) -> tuple[int, int] | None:
    if limit is None or limit >= V1_UNLIMITED:
        return None
    return limit, limit - max(0, (usage or 0) - reclaimable)


def _stat(file: Path, key: str) -> int | None:
    for line in text_of(file).splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == key and words[1].isdigit():
            return int(words[1])
    return None


def _int(file: Path) -> int | None:
    text = text_of(file).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def text_of(file: Path) -> str:
    """Return the text of a file of the system; "" if it cannot be read."""
    try:
        fault("system.read")
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _append(items: list[T], item: T | None) -> None:
    if item is not None:
        items.append(item)
