"""`cpuserve doctor`: this machine as cpuserve sees it, and what to do about what is wrong."""

from __future__ import annotations

import argparse
import platform as stdlib_platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata

import msgspec

from cpuserve.config.decisions import Ledger
from cpuserve.config.engine import EngineOptions, ServerOptions
from cpuserve.config.env import environment
from cpuserve.config.load import Asked, load_options
from cpuserve.config.values import GIB, format_bytes, format_cpus
from cpuserve.entrypoints.busy import Program, busiest
from cpuserve.entrypoints.terminal import say
from cpuserve.errors import ConfigError, CpuserveError
from cpuserve.loader.hub import cache_dir
from cpuserve.platforms import Host, Platform, select
from cpuserve.platforms.cpu import TORCH_REMEDY, CpuPlatform
from cpuserve.platforms.layout import ranks_of_nodes
from cpuserve.platforms.placement import Placement, place
from cpuserve.platforms.report import (
    MachineReport,
    PlacementReport,
    describe,
    describe_placement,
    render_machine,
)
from cpuserve.platforms.topology import physical_cores
from cpuserve.version import version

LIBRARIES = ("numpy", "tokenizers", "fastapi", "uvicorn", "msgspec", "torch", "transformers")
ROOFLINE_MEMORY = 2 * GIB  # a probe must not be what fills the memory
BUSY_SHARE = 0.25  # other programs that want more of the CPUs than this are worth a word


class Problem(msgspec.Struct, frozen=True):
    """Something found wrong, and what helps."""

    what: str
    remedy: str


class RooflineReport(msgspec.Struct, frozen=True, kw_only=True):
    """What all threads can do now: bytes read and operations (by type) a second, a barrier."""

    threads: int
    read_bytes_per_s: float
    dot_ops_per_s: dict[str, float]
    barrier_s: float


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `cpuserve doctor --json` prints. kernels: name -> the level that provides it.

    placement is what a server started now with this environment would get; null where that would be
    refused, which is among the problems then. roofline is null where it was not measured.
    """

    cpuserve: str
    python: str
    system: str
    platform: str
    dtypes: tuple[str, ...]
    quantizations: tuple[str, ...]
    machine: MachineReport
    placement: PlacementReport | None
    kernels: dict[str, str]
    libraries: dict[str, str | None]
    roofline: RooflineReport | None
    notes: tuple[str, ...]
    problems: tuple[Problem, ...]


def main(args: argparse.Namespace) -> int:
    """Print the report; exit code 0 whatever was found, as nothing failed."""
    report = examine(measure=not args.no_roofline)
    if args.json:
        say(msgspec.json.format(msgspec.json.encode(report), indent=1).decode())
    else:
        say(render(report))
    return 0


def schema() -> bytes:
    """The JSON schema of the report, as docs/doctor.schema.json has it."""
    made = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **msgspec.json.schema(DoctorReport),
    }
    return msgspec.json.format(msgspec.json.encode(made), indent=1) + b"\n"


def examine(*, measure: bool) -> DoctorReport:
    """The report; `measure` takes about a second of all cores."""
    found: list[Problem] = []
    try:
        asked = load_options({})
    except ConfigError as error:
        asked = Asked(EngineOptions(), ServerOptions(), {})
        found.append(Problem(str(error), "correct the variable: a server would not start with it"))
    platform, lines = _platform(asked.options, found)
    host = platform.host()
    placement = _placement(asked, host, found)
    capabilities = platform.capabilities(host)
    machine = describe(host, capabilities)
    roofline = _roofline(host, machine.tier, placement) if measure else None
    found += problems(host, placement, environment(), busiest() if _is_busy(host) else ())
    return DoctorReport(
        cpuserve=version(),
        python=stdlib_platform.python_version(),
        system=f"{stdlib_platform.system()} {host.kernel} {host.arch}",
        platform=platform.name,
        dtypes=capabilities.dtypes,
        quantizations=capabilities.quantizations,
        machine=machine,
        placement=describe_placement(host, placement) if placement else None,
        kernels=dict(platform.kernels(machine.tier)),
        libraries={name: _version_of(name) for name in LIBRARIES},
        roofline=roofline,
        notes=(*lines, *_model_notes(), *asked.notes),
        problems=tuple(found),
    )


def _model_notes() -> list[str]:
    from cpuserve.models import plugin_notes

    return plugin_notes()


def _platform(options: EngineOptions, found: list[Problem]) -> tuple[Platform, list[str]]:
    try:
        return select(options.platform)
    except ConfigError as error:
        found.append(Problem(str(error), "name another one, or none"))
        return select("cpu")


def _placement(asked: Asked, host: Host, found: list[Problem]) -> Placement | None:
    """Where a server's threads would sit, with CPUSERVE_* as they are."""
    options = asked.options
    try:
        ranks, replicas = ranks_of_nodes(options, host), options.data_parallel_size or 1
        return place(options, Ledger(options, asked.sources), host, tp=ranks, dp=replicas)
    except ConfigError as error:
        found.append(Problem(str(error), "correct the variable: a server would not start with it"))
        return None


def _roofline(host: Host, tier: str, placement: Placement | None) -> RooflineReport | None:
    if tier == "none" or placement is None or host.memory_free < ROOFLINE_MEMORY:
        return None
    cpus = None if placement.cpus is None else [int(cpu) for cpu in placement.cpus]
    try:
        probe = CpuPlatform().roofline(tier, placement.threads, cpus)
    except (CpuserveError, RuntimeError, ValueError):  # a report must not fail for a probe
        return None
    return msgspec.convert({"threads": placement.threads, **probe.measure()}, RooflineReport)


# -- problems -------------------------------------------------------------------------------------


def problems(
    host: Host,
    placement: Placement | None,
    env: Mapping[str, str] | None = None,
    busy: Sequence[Program] = (),
) -> Iterator[Problem]:
    """What costs speed or stops a start on this host; `busy` are the programs that run now."""
    yield from _kernel_problems(host)
    yield from _memory_problems(host)
    yield from _quota_problems(host, placement)
    yield from _cpu_problems(host)
    yield from _load_problems(host, busy)
    yield from _numa_problems(host)
    limit = (env or {}).get("OMP_THREAD_LIMIT", "")
    if placement is not None and limit.isdigit() and int(limit) < placement.threads:
        what = f"OMP_THREAD_LIMIT={limit} forbids the {placement.threads} threads planned"
        yield Problem(what, "unset it, or bind fewer with CPUSERVE_OMP_THREADS_BIND")
    cache = cache_dir()
    while not cache.exists():
        cache = cache.parent
    if shutil.disk_usage(cache).free < GIB:
        yield Problem(f"less than 1 GiB of disk is free at {cache}", "set CPUSERVE_CACHE elsewhere")


def _kernel_problems(host: Host) -> Iterator[Problem]:
    if host.native_error:
        remedy = "reinstall cpuserve on this machine (pip install --force-reinstall cpuserve)"
        yield Problem(host.native_error, remedy)
    elif not [level for level in host.isa_levels if level != "scalar"]:
        remedy = f"use a CPU with AVX2 or NEON, or install the slow floor: {TORCH_REMEDY}"
        yield Problem("the kernels run at no level of this CPU", remedy)


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
    for name, limit in (("-v", host.address_space_limit), ("-d", host.data_limit)):
        if limit is not None and limit < host.memory_limit:
            what = f"ulimit {name} allows {format_bytes(limit)}, less than the memory there is"
            yield Problem(what, f"ulimit {name} unlimited, before the start")


def _quota_problems(host: Host, placement: Placement | None) -> Iterator[Problem]:
    quota, cores = host.cgroup.cpu_quota, len(physical_cores(host))
    if quota is not None and quota < cores:
        what = f"a CPU quota of {quota:g} on {cores} cores"
        if placement is not None:
            what += f": {placement.threads} threads will compute"
        yield Problem(what, "raise the quota (docker --cpus, Kubernetes limits.cpu) for more")
    if host.cgroup.throttled_periods:
        what = f"the kernel stopped this group {host.cgroup.throttled_periods} times for its quota"
        yield Problem(what, "raise the quota, or bind fewer threads with CPUSERVE_OMP_THREADS_BIND")


def _cpu_problems(host: Host) -> Iterator[Problem]:
    if len(host.usable_cpus) < len(host.cpus):
        what = f"this process may use {len(host.usable_cpus)} of {len(host.cpus)} CPUs"
        yield Problem(what, "widen the affinity mask or cpuset if that is not on purpose")
    if host.offline:
        what = f"CPU {format_cpus(host.offline)} is switched off"
        yield Problem(
            what, "echo 1 > /sys/devices/system/cpu/cpuN/online (as root) if it should run"
        )
    # Under the pstate drivers powersave is the usual governor, and does not keep the clock low.
    if host.governor.startswith("powersave") and "pstate" not in host.governor:
        what = f"the clock is kept low (cpufreq governor {host.governor})"
        yield Problem(what, "cpupower frequency-set -g performance (as root)")


def _is_busy(host: Host) -> bool:
    return host.load > len(host.usable_cpus) * BUSY_SHARE


def _load_problems(host: Host, busy: Sequence[Program]) -> Iterator[Problem]:
    if not _is_busy(host):
        return
    what = f"other programs wanted {host.load:.1f} CPUs in the last minute"
    if busy:
        named = ", ".join(f"{p.name} (process {p.pid}, {p.cpus:.1f})" for p in busy)
        what += f"; now: {named}"
    yield Problem(what, "end them, or bind to cores they do not use: a barrier waits for all")


def _numa_problems(host: Host) -> Iterator[Problem]:
    nodes = {core.node for core in physical_cores(host)}
    if len(nodes) > 1 and host.numa_balancing:
        what = (
            "the kernel moves pages between nodes (numa_balancing), which stalls threads and, "
            "where a container refuses mbind, takes weights and KV cache away from their ranks"
        )
        yield Problem(what, "sysctl kernel.numa_balancing=0 (as root)")
    away = sorted({cpu.node for cpu in host.usable_cpus} - nodes)
    if away:
        what = f"CPUs of node {format_cpus(away)} have no memory near that this process may take"
        yield Problem(what, "allow their node's memory (cpuset.mems, docker --cpuset-mems)")


# -- the page -------------------------------------------------------------------------------------


def render(report: DoctorReport) -> str:
    """The report as a page for a person."""
    title = f"cpuserve {report.cpuserve}, Python {report.python}, {report.system}"
    lines = [title, *(f"{name:<9} {text}" for name, text in _subjects(report))]
    lines += ["", *_found(report)]
    return "\n".join(lines)


def _subjects(report: DoctorReport) -> Iterator[tuple[str, str]]:
    if report.platform != "cpu":
        yield "platform", report.platform
    yield from render_machine(report.machine)
    yield from _threads(report.placement)
    yield "roofline", _rates(report.roofline)
    yield "libraries", ", ".join(f"{n} {v}" for n, v in report.libraries.items() if v)
    for text in report.notes:
        yield "note", text


def _threads(placement: PlacementReport | None) -> Iterator[tuple[str, str]]:
    if placement is None:
        yield "threads", "a server would not start, see below"
        return
    front_end = f"on CPU {placement.frontend}" if placement.frontend else "anywhere"
    waits = ", waiting asleep" if placement.passive_waits else ""
    yield "threads", f"{placement.threads} (bind {placement.bind}){waits}, front end {front_end}"
    yield "", "* thread, f front end, . neither, e slower core; CPUs of one core joined by +"
    for line in placement.drawing:
        yield "", line


def _rates(roofline: RooflineReport | None) -> str:
    if roofline is None:
        return "not measured"
    names = {"f32": "fp32", "bf16": "bf16", "int8": "int8"}
    dots = [f"{names.get(k, k)} {v / 1e9:.0f}" for k, v in roofline.dot_ops_per_s.items()]
    reads = roofline.read_bytes_per_s / 1e9
    return (
        f"{roofline.threads} threads read {reads:.1f} GB/s (1 GB of weights: at most {reads:.1f} "
        f"tokens/s for one request), multiply {', '.join(dots)} GOP/s, meet in "
        f"{roofline.barrier_s * 1e6:.1f} us"
    )


def _found(report: DoctorReport) -> Iterator[str]:
    if not report.problems:
        yield "No problems found."
    for problem in report.problems:
        yield f"PROBLEM   {problem.what}\n  remedy  {problem.remedy}"


def _version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    import sys

    sys.stdout.buffer.write(schema())
