"""Which CPUs the compute threads get, and which are left to the front end."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cpuserve.config.decisions import Ledger
from cpuserve.config.engine import EngineOptions
from cpuserve.config.values import format_cpus, parse_bind
from cpuserve.errors import ConfigError
from cpuserve.ids import CpuId, NodeId
from cpuserve.platforms.host import Cpu, Host

SMALL = 4  # up to this many allowed cores a reserved one would cost more than it saves


@dataclass(frozen=True, slots=True)
class Placement:
    """cpus: one per thread in thread order, None = not pinned; frontend: None = anywhere."""

    threads: int
    cpus: list[CpuId] | None
    frontend: list[CpuId] | None


def place(options: EngineOptions, ledger: Ledger, host: Host) -> Placement:
    """Threads and their CPUs.

    Raises:
        ConfigError: a CPU outside the allowed set, several ranks, or more reserved than there are.
    """
    bind = parse_bind(options.omp_threads_bind or "auto")
    if bind == "auto":
        placement, why = _auto(options, ledger, host)
    elif bind == "nobind":
        placement, why = _nobind(options, host)
    else:
        assert isinstance(bind, list)
        placement, why = _listed(bind, ledger, host)
    if bind != "auto" and options.num_reserved_cpu is not None:
        ledger.decide("num_reserved_cpu", 0, "only auto binding reserves cores")
    ledger.decide("threads", placement.threads, why)
    got = "not pinned" if placement.cpus is None else format_cpus(placement.cpus)
    ledger.decide("omp_threads_bind", got, _pinning(placement))
    where = "anywhere" if placement.frontend is None else format_cpus(placement.frontend)
    ledger.decide("frontend_cpus", where, "HTTP, templates and text run there")
    return placement


def nodes_in_use(placement: Placement, host: Host) -> set[NodeId]:
    """The NUMA nodes whose cores compute."""
    chosen = None if placement.cpus is None else set(placement.cpus)
    return {c.node for c in host.usable_cpus if chosen is None or c.id in chosen}


def physical_cores(host: Host) -> list[list[Cpu]]:
    """The usable CPUs of each physical core, ordered by node, then by lowest CPU."""
    cores: dict[int, list[Cpu]] = {}
    for cpu in host.usable_cpus:
        cores.setdefault(cpu.core, []).append(cpu)
    return sorted(cores.values(), key=lambda core: (core[0].node, core[0].id))


def quota_threads(host: Host) -> int | None:
    """Threads the CPU quota pays for: its floor, at least one; None without a quota.

    More threads than quota are stopped together by the kernel for the rest of each period, at a
    barrier that means all of them: the floor is what runs without a stop.
    """
    quota = host.cgroup.cpu_quota
    return None if quota is None else max(1, math.floor(quota))


def _auto(options: EngineOptions, ledger: Ledger, host: Host) -> tuple[Placement, str]:
    cores = physical_cores(host)
    reserved = _reserve(options.num_reserved_cpu, ledger, cores)
    kept = [core for core in cores if core not in reserved]
    limit = quota_threads(host)
    chosen = kept if limit is None else kept[:limit]
    frontend = [c.id for core in reserved for c in core] or None
    why = f"one per physical core of the {len(host.usable_cpus)} CPUs this process may use"
    if reserved:
        why += f", {len(reserved)} left to the front end"
    if limit is not None and limit < len(kept):
        why = f"the CPU quota of {host.cgroup.cpu_quota:g} pays for {len(chosen)} at full speed"
    return Placement(len(chosen), [core[0].id for core in chosen], frontend), why


def _reserve(asked: int | None, ledger: Ledger, cores: list[list[Cpu]]) -> list[list[Cpu]]:
    """Cores left out: from the tail of each node, the last nodes first where it does not divide."""
    nodes = sorted({core[0].node for core in cores})
    count = asked
    if count is None:
        count = 0 if len(cores) <= SMALL else len(nodes)
        why = "few cores: none can be spared" if count == 0 else "one per NUMA node in use"
    else:
        why = "as asked"
    if count >= len(cores):
        msg = (
            f"{ledger.asked('num_reserved_cpu')}: this process may use {len(cores)} cores and at "
            f"least one must compute; give at most {len(cores) - 1}"
        )
        raise ConfigError(msg)
    ledger.decide("num_reserved_cpu", count, why)
    reserved: list[list[Cpu]] = []
    left = {n: [c for c in cores if c[0].node == n] for n in nodes}
    while len(reserved) < count:
        node = max((n for n in nodes if left[n]), key=lambda n: (len(left[n]), n))
        reserved.append(left[node].pop())
    return sorted(reserved, key=lambda core: core[0].id)


def _nobind(options: EngineOptions, host: Host) -> tuple[Placement, str]:
    if options.omp_num_threads is not None:
        return Placement(options.omp_num_threads, None, None), "OMP_NUM_THREADS"
    cores = len(physical_cores(host))
    limit = quota_threads(host)
    threads = cores if limit is None else min(cores, limit)
    why = "one per physical core" if threads == cores else "what the CPU quota pays for"
    return Placement(threads, None, None), why


def _listed(ranks: list[list[CpuId]], ledger: Ledger, host: Host) -> tuple[Placement, str]:
    asked = ledger.asked("omp_threads_bind")
    if len(ranks) != 1:
        msg = (
            f"{asked}: lists CPUs for {len(ranks)} ranks and tensor-parallel-size is 1; "
            f"give one list, such as {format_cpus([c for rank in ranks for c in rank])}"
        )
        raise ConfigError(msg)
    usable = [c.id for c in host.usable_cpus]
    outside = [c for c in ranks[0] if c not in set(usable)]
    if outside:
        msg = (
            f"{asked}: CPU {format_cpus(outside)} is not among the CPUs this process may use "
            f"({format_cpus(usable)}); the affinity mask or container decides"
        )
        raise ConfigError(msg)
    why = "one per CPU listed"
    limit = quota_threads(host)
    if limit is not None and limit < len(ranks[0]):
        why += f"; the CPU quota of {host.cgroup.cpu_quota:g} will stop them part of the time"
    return Placement(len(ranks[0]), ranks[0], None), why


def _pinning(placement: Placement) -> str:
    return "the kernel places threads" if placement.cpus is None else "each thread keeps its CPU"
