"""`cpuserve doctor`: this machine as cpuserve sees it, and what to do about what is wrong."""

from __future__ import annotations

import argparse
import json
import platform as stdlib_platform
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import msgspec

from cpuserve.config.decisions import Ledger
from cpuserve.config.engine import EngineOptions
from cpuserve.config.env import read_env
from cpuserve.config.values import GIB, format_bytes, format_cpus
from cpuserve.entrypoints.terminal import say
from cpuserve.loader.hub import cache_dir
from cpuserve.platforms import Host, select
from cpuserve.platforms.cpu import TORCH_REMEDY, CpuPlatform
from cpuserve.platforms.placement import Placement, place
from cpuserve.platforms.tiers import tier_of
from cpuserve.platforms.topology import physical_cores
from cpuserve.version import version

LIBRARIES = ("numpy", "tokenizers", "fastapi", "uvicorn", "msgspec", "torch", "transformers")


@dataclass(frozen=True, slots=True)
class Problem:
    """Something found wrong, and what helps."""

    what: str
    remedy: str


def main(args: argparse.Namespace) -> int:
    """Print the report; exit code 0 whatever was found, as nothing failed."""
    report = examine()
    say(json.dumps(report, indent=1) if args.json else render(report))
    return 0


def examine() -> dict[str, Any]:
    """The report as plain data."""
    host = CpuPlatform().host()
    platform, notes = select(None)
    env = read_env()
    placement = place(EngineOptions(), Ledger(EngineOptions(), {}), host)
    tier, means = tier_of(host)
    return {
        "cpuserve": version(),
        "python": stdlib_platform.python_version(),
        "system": f"{stdlib_platform.system()} {host.kernel} {host.arch}",
        "platform": platform.name,
        "tier": tier,
        "tier_means": means,
        "host": msgspec.to_builtins(host),
        "cores": len(physical_cores(host)),
        "threads": placement.threads,
        "topology": list(draw(host, placement)),
        "kernels": dict(platform.kernels(tier)),
        "libraries": {name: _version_of(name) for name in LIBRARIES},
        "notes": [*notes, *env.notes],
        "problems": [asdict(p) for p in problems(host, placement)],
    }


def problems(host: Host, placement: Placement) -> Iterator[Problem]:
    """What costs speed or stops a start on this host."""
    if host.native_error:
        remedy = "reinstall cpuserve on this machine (pip install --force-reinstall cpuserve)"
        yield Problem(host.native_error, remedy)
    elif not [level for level in host.isa_levels if level != "scalar"]:
        remedy = f"use a CPU with AVX2 or NEON, or install the slow floor: {TORCH_REMEDY}"
        yield Problem("the kernels run at no level of this CPU", remedy)
    yield from _memory_problems(host)
    quota = host.cgroup.cpu_quota
    if quota is not None and quota < len(physical_cores(host)):
        what = f"a CPU quota of {quota:g} on {len(physical_cores(host))} cores: "
        what += f"{placement.threads} threads will compute"
        yield Problem(what, "raise the quota (docker --cpus, Kubernetes limits.cpu) for more")
    if host.cgroup.throttled_periods:
        what = f"the kernel stopped this group {host.cgroup.throttled_periods} times for its quota"
        yield Problem(what, "raise the quota, or bind fewer threads with CPUSERVE_OMP_THREADS_BIND")
    if len(host.usable_cpus) < len(host.cpus):
        what = f"this process may use {len(host.usable_cpus)} of {len(host.cpus)} CPUs"
        yield Problem(what, "widen the affinity mask or cpuset if that is not on purpose")
    cache = cache_dir()
    while not cache.exists():
        cache = cache.parent
    if shutil.disk_usage(cache).free < GIB:
        yield Problem(f"less than 1 GiB of disk is free at {cache}", "set CPUSERVE_CACHE elsewhere")


def _memory_problems(host: Host) -> Iterator[Problem]:
    if host.memory_free < GIB:
        what = f"only {format_bytes(host.memory_free)} of memory is free"
        yield Problem(what, "end other programs, raise the container's limit, or serve less")
    if host.huge_pages.transparent == "never":
        remedy = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (as root)"
        yield Problem("transparent huge pages are off: decoding is about a tenth slower", remedy)
    if host.cgroup.memory_limit and host.cgroup.memory_limit < host.memory_total // 8:
        what = f"the container has {format_bytes(host.cgroup.memory_limit)} of memory"
        yield Problem(what, "raise the limit if models do not fit; cpuserve plans within it")


def draw(host: Host, placement: Placement) -> Iterator[str]:
    """A line for each node: its cores, with * where a compute thread sits and f the front end."""
    threads = set(placement.cpus or [])
    frontend = set(placement.frontend or [])
    by_node: dict[int, list[str]] = {}
    for core in physical_cores(host):
        ids = core.cpus
        mark = "*" if threads & set(ids) else "f" if frontend & set(ids) else " "
        by_node.setdefault(core.node, []).append(f"{mark}{'+'.join(map(str, ids))}")
    for node, cores in sorted(by_node.items()):
        yield f"node {node}: {' '.join(cores)}"


def render(report: dict[str, Any]) -> str:
    """The report as a page for a person."""
    host = msgspec.convert(report["host"], Host)
    group, pages = host.cgroup, host.huge_pages
    quota = "none" if group.cpu_quota is None else f"{group.cpu_quota:g} CPUs"
    limit = "none" if group.memory_limit is None else format_bytes(group.memory_limit)
    allowed = format_cpus([c.id for c in host.usable_cpus])
    free, total = format_bytes(host.memory_free), format_bytes(host.memory_total)
    lines = [
        f"cpuserve {report['cpuserve']}, Python {report['python']}, {report['system']}",
        f"CPU       {host.cpu_model}, {report['cores']} cores, CPUs {allowed}",
        f"tier      {report['tier']}: {report['tier_means']}",
        f"levels    {', '.join(host.isa_levels) or 'none'}",
        f"features  {' '.join(_shown_flags(host)) or 'not listed'}",
        f"memory    {free} free of {total}",
        f"cgroup    v{group.version or '-'}, CPU quota {quota}, memory limit {limit}",
        f"pages     transparent huge pages {pages.transparent}, "
        f"2 MiB pool {pages.pool_free} of {pages.pool_total} free",
        f"threads   {report['threads']} (* below; f is the front end)",
        *(f"          {line}" for line in report["topology"]),
        "libraries " + ", ".join(f"{n} {v}" for n, v in report["libraries"].items() if v),
        *(f"note      {text}" for text in report["notes"]),
    ]
    if not report["problems"]:
        lines.append("No problems found.")
    for problem in report["problems"]:
        lines.append(f"PROBLEM   {problem['what']}\n  remedy  {problem['remedy']}")
    return "\n".join(lines)


def _shown_flags(host: Host) -> list[str]:
    """The instruction sets that matter here, as lscpu names them."""
    prefixes = ("avx", "fma", "f16c", "amx", "asimd", "sve", "i8mm", "bf16")
    return [flag for flag in host.cpu_flags if flag.startswith(prefixes)]


def _version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
