"""`cpuserve doctor`: report on this machine, its problems, and their remedies."""

from __future__ import annotations

import argparse
import inspect
import os
import platform
import platform as stdlib_platform
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import msgspec

from cpuserve.base.errors import ConfigError, CpuserveError
from cpuserve.base.version import version
from cpuserve.cli.terminal import columns, folded, say
from cpuserve.config.decisions import Ledger
from cpuserve.config.env import cache_dir, environment
from cpuserve.config.load import Asked, load_options
from cpuserve.config.options import EngineOptions
from cpuserve.config.server import ServerOptions
from cpuserve.config.values import GIB, format_bytes, format_cpus
from cpuserve.platforms import Host, Platform, select
from cpuserve.platforms.cpu import CpuPlatform
from cpuserve.platforms.handicaps import handicaps
from cpuserve.platforms.layout import numa_notes, ranks_of_nodes
from cpuserve.platforms.limits import RateLimit, limits_by_type, told_limits
from cpuserve.platforms.placement import Placement, place
from cpuserve.platforms.report import (
    MachineReport,
    PlacementReport,
    WorkReport,
    describe,
    describe_placement,
    render_machine,
    render_work,
)
from cpuserve.platforms.topology import physical_cores
from cpuserve.platforms.tuned import tuned_notes

LIBRARIES = ("numpy", "tokenizers", "fastapi", "uvicorn", "msgspec", "torch", "transformers")
ROOFLINE_MEMORY = 2 * GIB  # the roofline probe needs this many free bytes of memory
DOT_NAMES = {"f32": "fp32", "bf16": "bf16", "int8": "int8", "int4": "int4"}
BUSY_SHARE = 0.25  # report other programs that use more than this share of the CPUs


class Problem(msgspec.Struct, frozen=True):
    """A problem of the machine, and how to remedy it."""

    what: str
    remedy: str


class RooflineReport(msgspec.Struct, frozen=True, kw_only=True):
    """Rates of all threads together: bytes and operations (by type) per second; barrier time.

    limits: for each type of dot products, the most tokens per second that 1, 4, 8 and 32 requests
      can decode together with a model of a billion weights (in fp32, bf16, Q8_0 and Q4_0).
    """

    threads: int
    read_bytes_per_s: float
    dot_ops_per_s: dict[str, float]
    barrier_s: float
    limits: dict[str, tuple[RateLimit, ...]]


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report that `cpuserve doctor --json` prints.

    kernels: the ISA level that provides each kernel, by the name of the kernel.
    work: the block sizes of the kernels; null if this machine cannot run the kernels.
    allocator: the library that provides malloc with the current environment (LD_PRELOAD).
    placement: the thread placement of a server that is started now with this environment;
      null if the server would not start (then `problems` has the reason).
    roofline: the measured rates; null if they were not measured.
    """

    cpuserve: str
    python: str
    system: str
    platform: str
    dtypes: tuple[str, ...]
    quantizations: tuple[str, ...]
    machine: MachineReport
    placement: PlacementReport | None
    work: WorkReport | None
    kernels: dict[str, str]
    allocator: str
    libraries: dict[str, str | None]
    roofline: RooflineReport | None
    notes: tuple[str, ...]
    problems: tuple[Problem, ...]


def main(args: argparse.Namespace) -> int:
    """Print the report; the exit code is 0 even if it lists problems."""
    report = examine(measure=not args.no_roofline)
    if args.json:
        say(msgspec.json.format(msgspec.json.encode(report), indent=1).decode())
    else:
        say(render(report, columns(sys.stdout)))
    return 0


def schema() -> bytes:
    """Return the JSON schema of the report, the content of docs/doctor.schema.json."""
    made = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **msgspec.json.schema(DoctorReport),
    }
    for kind in made["$defs"].values():  # msgspec keeps the indentation of docstrings before 0.23
        kind["description"] = inspect.cleandoc(kind["description"])
    return msgspec.json.format(msgspec.json.encode(made), indent=1) + b"\n"


def examine(*, measure: bool) -> DoctorReport:
    """Return the report. measure: also measure the roofline, which uses all cores for a second."""
    found: list[Problem] = []
    try:
        asked = load_options({})
    except ConfigError as error:
        asked = Asked(EngineOptions(), ServerOptions(), {})
        found.append(
            Problem(str(error), "correct the variable: a server does not start with this value")
        )
    platform, lines = _platform(asked.options, found)
    host = platform.host()
    placement = _placement(asked, host, found)
    capabilities = platform.capabilities(host)
    machine = describe(host, capabilities)
    roofline = _roofline(host, machine.isa_level, placement) if measure else None
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
        work=_work(platform, host, machine.isa_level, placement),
        kernels=dict(platform.kernels(machine.isa_level)),
        allocator=allocator(_maps()),
        libraries={name: _version_of(name) for name in LIBRARIES},
        roofline=roofline,
        notes=(
            *lines,
            *tuned_notes(host.tuned, machine.isa_level),
            *numa_notes(asked.options, host),
            *_model_notes(),
            *asked.notes,
        ),
        problems=tuple(found),
    )


def _work(
    platform: Platform, host: Host, isa: str, placement: Placement | None
) -> WorkReport | None:
    cpus = placement.thread_cpus if placement else None
    cpu = platform if isinstance(platform, CpuPlatform) else CpuPlatform()
    return cpu.work(host, isa, cpus[0][0] if cpus else 0)


def _model_notes() -> list[str]:
    from cpuserve.models import plugin_notes

    return plugin_notes()


def _platform(options: EngineOptions, found: list[Problem]) -> tuple[Platform, list[str]]:
    try:
        return select(options.platform)
    except ConfigError as error:
        found.append(Problem(str(error), "choose another platform, or do not set one"))
        return CpuPlatform(), []


def _placement(asked: Asked, host: Host, found: list[Problem]) -> Placement | None:
    """Return the thread placement of a server that starts with the current CPUSERVE_* variables."""
    options = asked.options
    try:
        ranks, replicas = ranks_of_nodes(options, host), options.data_parallel_size or 1
        return place(options, Ledger(options, asked.sources), host, tp=ranks, dp=replicas)
    except ConfigError as error:
        found.append(
            Problem(str(error), "correct the variable: a server does not start with this value")
        )
        return None


def _roofline(host: Host, isa: str, placement: Placement | None) -> RooflineReport | None:
    if isa == "none" or placement is None or host.memory_free < ROOFLINE_MEMORY:
        return None
    try:
        probe = CpuPlatform().roofline(isa, placement.threads, placement.thread_cpus)
    except (CpuserveError, RuntimeError, ValueError):  # leave only the roofline out of the report
        return None
    measured = probe.measure()
    limits = limits_by_type(measured["read_bytes_per_s"], measured["dot_ops_per_s"])
    return msgspec.convert(
        {"threads": placement.threads, **measured, "limits": limits}, RooflineReport
    )


# -- problems of the machine ----------------------------------------------------------------------


def problems(
    host: Host,
    placement: Placement | None,
    env: Mapping[str, str] | None = None,
    busy: Sequence[BusyProcess] = (),
) -> Iterator[Problem]:
    """Yield conditions that reduce speed or prevent a start. busy: programs that use the CPUs."""
    yield from (Problem(what, remedy) for what, remedy in handicaps(host))
    yield from _memory_problems(host)
    yield from _quota_problems(host, placement)
    yield from _cpu_problems(host)
    yield from _load_problems(host, busy)
    yield from _numa_problems(host)
    limit = (env or {}).get("OMP_THREAD_LIMIT", "")
    if placement is not None and limit.isdigit() and int(limit) < placement.threads:
        what = f"OMP_THREAD_LIMIT={limit} is below the {placement.threads} planned threads"
        yield Problem(what, "unset it, or bind fewer threads with CPUSERVE_OMP_THREADS_BIND")
    cache = cache_dir()
    while not cache.exists():
        cache = cache.parent
    if shutil.disk_usage(cache).free < GIB:
        yield Problem(
            f"less than 1 GiB of disk is free at {cache}", "set CPUSERVE_CACHE to another disk"
        )


def _memory_problems(host: Host) -> Iterator[Problem]:
    if host.memory_free < GIB:
        what = f"only {format_bytes(host.memory_free)} of memory is free"
        yield Problem(
            what, "stop other programs, raise the container's limit, or serve a smaller model"
        )
    if host.huge_pages.transparent == "never":
        remedy = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (as root)"
        yield Problem(
            "transparent huge pages are disabled, which makes decoding about 10 % slower", remedy
        )
    if host.cgroup.memory_limit and host.cgroup.memory_limit < host.memory_total // 8:
        what = f"the container has {format_bytes(host.cgroup.memory_limit)} of memory"
        yield Problem(
            what, "raise the limit if models do not fit; cpuserve plans its memory below the limit"
        )
    for name, limit in (("-v", host.address_space_limit), ("-d", host.data_limit)):
        if limit is not None and limit < host.memory_limit:
            what = f"ulimit {name} allows {format_bytes(limit)}, less than the available memory"
            yield Problem(what, f"run `ulimit {name} unlimited` before the start")


def _quota_problems(host: Host, placement: Placement | None) -> Iterator[Problem]:
    quota, cores = host.cgroup.cpu_quota, len(physical_cores(host))
    if quota is not None and quota < cores:
        what = f"the CPU quota is {quota:g} of {cores} cores"
        if placement is not None:
            what += f": cpuserve will use {placement.threads} threads"
            if placement.cpus is None:
                what += ", which the kernel places"
        yield Problem(
            what, "raise the quota (docker --cpus, Kubernetes limits.cpu) for more threads"
        )
    if host.cgroup.throttled_periods:
        what = f"the kernel throttled this control group {host.cgroup.throttled_periods} times"
        yield Problem(what, "raise the quota, or bind fewer threads with CPUSERVE_OMP_THREADS_BIND")


def _cpu_problems(host: Host) -> Iterator[Problem]:
    if len(host.usable_cpus) < len(host.cpus):
        what = f"this process may use {len(host.usable_cpus)} of {len(host.cpus)} CPUs"
        yield Problem(what, "widen the affinity mask or the cpuset if this is not intended")
    if host.offline:
        what = f"CPU {format_cpus(host.offline)} is offline"
        yield Problem(what, "echo 1 > /sys/devices/system/cpu/cpuN/online (as root) to use it")
    # With pstate drivers, powersave is the default governor and does not keep the clock rate low.
    if host.governor.startswith("powersave") and "pstate" not in host.governor:
        what = f"the cpufreq governor {host.governor} keeps the clock low"
        yield Problem(what, "cpupower frequency-set -g performance (as root)")


def _is_busy(host: Host) -> bool:
    return host.load > len(host.usable_cpus) * BUSY_SHARE


def _load_problems(host: Host, busy: Sequence[BusyProcess]) -> Iterator[Problem]:
    if not _is_busy(host):
        return
    what = f"other programs used or waited for {host.load:.1f} CPUs in the last minute"
    if busy:
        named = ", ".join(f"{p.name} (process {p.pid}, {p.cpus:.1f})" for p in busy)
        what += f"; now: {named}"
    yield Problem(
        what, "stop them, or bind cpuserve to other cores: all threads wait for the slowest one"
    )


def _numa_problems(host: Host) -> Iterator[Problem]:
    nodes = {core.node for core in physical_cores(host)}
    if len(nodes) > 1 and host.numa_balancing:
        what = (
            "the kernel moves pages between nodes (numa_balancing), which stalls threads "
            "and, if a container refuses mbind, moves weights and KV cache away from their ranks"
        )
        yield Problem(what, "sysctl kernel.numa_balancing=0 (as root)")
    away = sorted({cpu.node for cpu in host.usable_cpus} - nodes)
    if away:
        what = f"this process can use CPUs but no memory of node {format_cpus(away)}"
        yield Problem(what, "allow the memory of these nodes (cpuset.mems, docker --cpuset-mems)")


# -- the report as text ---------------------------------------------------------------------------


def render(report: DoctorReport, width: int | None = None) -> str:
    """Return the report as lines of text of at most `width` columns; None = no limit."""
    title = f"cpuserve {report.cpuserve}, Python {report.python}, {report.system}"
    lines = [title, *(f"{name:<9} {text}" for name, text in _subjects(report))]
    lines += ["", *_found(report)]
    return "\n".join(folded(line, width, " " * 10) for line in lines)


def _subjects(report: DoctorReport) -> Iterator[tuple[str, str]]:
    if report.platform != "cpu":
        yield "platform", report.platform
    yield from render_machine(report.machine)
    yield from _threads(report.placement)
    if report.work is not None:
        yield from render_work(report.work)
    yield "roofline", _rates(report.roofline)
    if report.roofline is not None:
        yield "limits", "a model with a billion weights decodes"
        for dot, limits in report.roofline.limits.items():
            yield "", f"{DOT_NAMES[dot]}: at most {told_limits(limits)}"
    yield "allocator", f"{report.allocator}: {ALLOCATOR_MEANS}"
    yield "libraries", ", ".join(f"{n} {v}" for n, v in report.libraries.items() if v)
    for text in report.notes:
        yield "note", text


def _threads(placement: PlacementReport | None) -> Iterator[tuple[str, str]]:
    if placement is None:
        yield "threads", "unknown: a server would not start now (see the problems below)"
        return
    front_end = f"on CPU {placement.frontend}" if placement.frontend else "anywhere"
    waits = ", sleeping while they wait" if placement.passive_waits else ""
    bind = f"{placement.bind} within {placement.within}" if placement.within else placement.bind
    yield "threads", f"{placement.threads} (bind {bind}){waits}, front end {front_end}"
    marks = "* compute thread, f front end, . unused, e slower core"
    if placement.bind == "nobind":
        marks = "~ threads may run here, f front end, . unused, e slower core"
    yield "", f"{marks}; + joins the CPUs of one core"
    for line in placement.drawing:
        yield "", line


def _rates(roofline: RooflineReport | None) -> str:
    if roofline is None:
        return "not measured"
    dots = [f"{DOT_NAMES[k]} {v / 1e9:.0f}" for k, v in roofline.dot_ops_per_s.items()]
    reads = roofline.read_bytes_per_s / 1e9
    return (
        f"{roofline.threads} threads read {reads:.1f} GB/s, multiply {', '.join(dots)} GOP/s, "
        f"synchronize at a barrier in {roofline.barrier_s * 1e6:.1f} us"
    )


def _found(report: DoctorReport) -> Iterator[str]:
    if not report.problems:
        yield "No problems found."
    for problem in report.problems:
        yield f"PROBLEM   {problem.what}"
        yield f"  remedy  {problem.remedy}"


def _maps() -> str:
    """Return the text of /proc/self/maps; "" on systems other than Linux."""
    try:
        return Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.stdout.buffer.write(schema())


WINDOW_S = 0.3
LEAST = 0.1  # programs that use less than 0.1 CPUs are not listed
MOST = 3


@dataclass(frozen=True, slots=True)
class BusyProcess:
    """A process: its name without arguments, which may be secret, and how many CPUs it uses."""

    pid: int
    name: str
    cpus: float


def busiest(proc_root: Path = Path("/proc"), window_s: float = WINDOW_S) -> list[BusyProcess]:
    """Return the other processes that used the most CPU time during `window_s`, busiest first."""
    before, start = _times(proc_root), time.monotonic()
    time.sleep(window_s)
    after, elapsed = _times(proc_root), time.monotonic() - start
    tick = os.sysconf("SC_CLK_TCK")
    used = [
        BusyProcess(pid, name, (ticks - before[pid][1]) / tick / elapsed)
        for pid, (name, ticks) in after.items()
        if pid in before and pid != os.getpid()
    ]
    busy = [program for program in used if program.cpus >= LEAST]
    return sorted(busy, key=lambda program: -program.cpus)[:MOST]


def _times(proc_root: Path) -> dict[int, tuple[str, int]]:
    """Return {pid: (name, clock ticks of CPU time)} of all visible processes."""
    found = {}
    for entry in proc_root.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:  # the process has ended meanwhile
            continue
        # The name may contain spaces and brackets, but the fields after its last bracket do not.
        head, _, tail = text.rpartition(")")
        name, fields = head.partition("(")[2], tail.split()
        found[int(entry.name)] = name, int(fields[11]) + int(fields[12])
    return found


# Libraries that replace the malloc of the C library if they are preloaded.
REPLACEMENTS = r"lib(?:tcmalloc|jemalloc|mimalloc)[\w.-]*"
# Counted with a preloaded library for one stream of SmolLM2: 14 calls of malloc a token
# in the engine, all for less than 128 KB and none in C++ code, and 2 in the front end.
# At 50 ns each (estimated) they take 1 us of the 7 ms of a token, the most
# that a faster allocator could save. Also, the front end returns freed memory with a function
# that only glibc has (platforms/heap.py).
ALLOCATOR_MEANS = "malloc is called 16 times a token, so tcmalloc or jemalloc would not help"


def allocator(maps: str) -> str:
    """Return the name of the library that provides malloc.

    maps: the content of /proc/self/maps, which lists the files that are mapped into the process.
    """
    found = re.search(rf"/({REPLACEMENTS})$", maps, re.MULTILINE)
    if found:
        return found[1]
    name, version = platform.libc_ver()
    return f"{name} {version}".strip() or "the C library"
