"""Thread placement: the CPUs for the threads of each rank, and the CPUs for the front end.

Placement is a pure function of the requested options and the host. A rank is a group of threads
with its own part of the model (tensor parallel); a replica is a separate engine (data parallel).
The ranks of one replica have consecutive numbers, so that neighbouring ranks share nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cpuserve.base.errors import ConfigError
from cpuserve.base.ids import CpuId, NodeId
from cpuserve.config.decisions import Ledger
from cpuserve.config.options import EngineOptions
from cpuserve.config.values import format_cpus, parse_bind, parse_nodes
from cpuserve.platforms.host import Host
from cpuserve.platforms.topology import (
    Core,
    by_node,
    compute_cores,
    physical_cores,
    share_out,
    slower,
    take_from_tails,
)

SMALL = 4  # with at most this many cores, reserving one for the front end costs more than it gains
# If there are more threads than the CPU quota covers, the kernel stops all threads for a part
# of each period, which makes the slowest steps slower. One more thread is therefore used only
# if its measured gain is clearly larger than the noise of the measurement.
WORTH_STOPPING = 1.1
ONE_PER_CORE = "one per physical core of the {} CPUs this process may use"
FRONT_END_PART = 8  # if slower cores compute, 1 / FRONT_END_PART of them is for the front end


@dataclass(frozen=True, slots=True)
class Rank:
    """The threads of one rank.

    cpus: the CPU of each thread in thread order, None = threads are not pinned.
    nodes: the NUMA nodes of its memory.
    within: the CPUs that threads without pinning may use, None = any CPU.
    """

    threads: int
    cpus: tuple[CpuId, ...] | None
    nodes: tuple[NodeId, ...]
    within: tuple[CpuId, ...] | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """The ranks of all replicas, and the CPUs of the front end (None = any CPU).

    passive_waits: whether waiting threads should sleep soon, since a CPU quota counts spinning.
    """

    ranks: tuple[Rank, ...]
    frontend: tuple[CpuId, ...] | None = None
    passive_waits: bool = False

    @property
    def threads(self) -> int:
        """The number of threads of all ranks together."""
        return sum(rank.threads for rank in self.ranks)

    @property
    def cpus(self) -> list[CpuId] | None:
        """The CPUs of all ranks, one CPU per thread; None = threads are not pinned."""
        if any(rank.cpus is None for rank in self.ranks):
            return None
        return [cpu for rank in self.ranks for cpu in rank.cpus or ()]

    @property
    def thread_cpus(self) -> list[list[int]] | None:
        """For each thread the CPUs that it may run on; None = any CPU."""
        if self.cpus is not None:
            return [[cpu] for cpu in self.cpus]
        moving = zip(self.ranks, rank_cpus(self.ranks), strict=False)
        return [cpus for rank, cpus in moving for _ in range(rank.threads)] or None

    @property
    def nodes(self) -> set[NodeId]:
        """The NUMA nodes with cores that compute."""
        return {node for rank in self.ranks for node in rank.nodes}


def place(
    options: EngineOptions,
    ledger: Ledger,
    host: Host,
    *,
    tp: int = 1,
    dp: int = 1,
    only: Sequence[NodeId] | None = None,
) -> Placement:
    """Place the threads of `dp` replicas with `tp` ranks each.

    only: the NUMA nodes that automatic binding may use; None = all nodes.

    Raises:
        ConfigError: this process may not use a CPU or node, the number of CPU lists is wrong, or
            there are more ranks or reserved cores than cores.
    """
    bind = parse_bind(options.omp_threads_bind or "auto")
    if bind == "auto":
        placement, why = _auto(options, ledger, host, tp * dp, only)
    elif bind == "nobind":
        placement, why = _nobind(options, ledger, host, tp * dp)
    else:
        assert isinstance(bind, list)
        placement, why = _listed(bind, ledger, host, tp * dp)
    if bind != "auto":
        _only_auto(options, ledger)
    ledger.decide("threads", placement.threads, why)
    pinning = "each thread stays on its CPU"
    if placement.cpus is None:
        pinning = "the kernel places threads"
        if bind == "auto":
            pinning += (
                f", since the CPU quota of {host.cgroup.cpu_quota:g} is below the "
                f"{len(host.usable_cpus)} CPUs and other containers may use the same ones"
            )
    if placement.passive_waits:
        pinning += "; waiting threads sleep soon, because the CPU quota counts spinning"
    ledger.decide("omp_threads_bind", bind_text(placement), pinning)
    where = "anywhere" if placement.frontend is None else format_cpus(list(placement.frontend))
    ledger.decide("frontend_cpus", where, "for HTTP, chat templates and tokenization")
    return placement


def bind_list(placement: Placement) -> str:
    """Return the placement as CPUSERVE_OMP_THREADS_BIND has it, such as "0-30|32-62"."""
    return "|".join(format_cpus(list(rank.cpus or ())) for rank in placement.ranks)


def bind_text(placement: Placement) -> str:
    """Return `bind_list`, or "not pinned", or "not pinned within 0-31|32-63"."""
    if placement.cpus is not None:
        return bind_list(placement)
    within = within_list(placement)
    return f"not pinned within {within}" if within else "not pinned"


def within_list(placement: Placement) -> str:
    """Return the CPUs that the threads of each rank may use, as "0-31|32-63"; "" = any CPU."""
    return "|".join(format_cpus(cpus) for cpus in rank_cpus(placement.ranks))


def rank_cpus(ranks: Sequence[Rank]) -> list[list[int]]:
    """Return the CPUs that the threads of each rank may use; [] = pinned, or any CPU."""
    within = [list[int](rank.within or ()) for rank in ranks]
    return within if all(within) else []


def quota_shares_cpus(host: Host) -> bool:
    """Whether the CPU quota covers fewer CPUs than this process may use.

    Such a quota does not say which CPUs to use. Every container on the machine may have the same
    affinity mask, as with the default CPU manager of Kubernetes. If each container bound itself
    to the first CPUs, all would compute on these CPUs and leave the other CPUs idle.
    """
    quota = host.cgroup.cpu_quota
    return quota is not None and quota < len(host.usable_cpus)


def measured_cpus(host: Host) -> tuple[int, list[list[int]] | None]:
    """Return (threads, CPUs of each thread or None) for measurements of this machine.

    There is a thread on each physical core, or as many as a CPU quota pays for. The CPUs are None
    under a quota that does not say which CPUs to use (`quota_shares_cpus`).
    """
    limit = quota_threads(host)
    cores = physical_cores(host)[: limit[0] if limit else None]
    return len(cores), None if quota_shares_cpus(host) else [[int(core.cpu)] for core in cores]


def quota_threads(host: Host) -> tuple[int, str] | None:
    """Return (number of threads for the CPU quota, the reason); None without a quota.

    A quota of q CPUs, rounded down to n, runs n threads without a stop. With n + 1 threads,
    the kernel stops them after q / (n + 1) of each period. The result is therefore n,
    unless n + 1 threads do enough more work while they run, as Host.thread_gain says.
    """
    quota = host.cgroup.cpu_quota
    if quota is None:
        return None
    floor = max(1, math.floor(quota))
    share = min(1.0, quota / (floor + 1))
    if quota > floor and host.thread_gain * share >= WORTH_STOPPING:
        return floor + 1, (
            f"the CPU quota of {quota:g} lets {floor + 1} threads run {share:.0%} of the time, "
            f"and they were {host.thread_gain:.2f} times as fast as {floor} when measured"
        )
    return floor, f"the CPU quota of {quota:g} lets {floor} run without a stop"


def extra_thread_may_pay(host: Host) -> bool:
    """Whether measuring Host.thread_gain could change the result of `quota_threads`.

    n + 1 threads do at most (n + 1) / n times the work of n threads, so quota / n limits the gain.
    """
    quota = host.cgroup.cpu_quota
    if quota is None or quota <= 1 or quota >= len(physical_cores(host)):
        return False
    floor = math.floor(quota)
    return floor < quota and quota / floor >= WORTH_STOPPING


def _passive(host: Host) -> bool:
    quota = host.cgroup.cpu_quota
    return quota is not None and quota < len(physical_cores(host))


def _auto(
    options: EngineOptions, ledger: Ledger, host: Host, ranks: int, only: Sequence[NodeId] | None
) -> tuple[Placement, str]:
    groups = _visible(options, ledger, host)
    if only is not None:
        groups = [group for group in groups if group[0].node in only]
    if quota_shares_cpus(host):
        return _moving(options, ledger, host, groups, ranks)
    cores = [core for group in groups for core in group]
    used = compute_cores(cores, ranks)
    slow = [core for core in cores if core not in used]
    nodes = [group[0].node for group in groups]
    helpers = slower(used)
    # Fast cores come first, because thread 0 runs the engine loop;
    # the front end gets the last cores.
    groups = by_node([c for c in used if c not in helpers] + helpers, nodes)
    reserved = _reserve(options.num_reserved_cpu, ledger, groups, bool(slow), len(helpers), ranks)
    helpers = [core for core in helpers if core not in reserved]
    kept = [[core for core in group if core not in reserved] for group in groups]
    shares = share_out(host, [group for group in kept if group], ranks)
    frontend = sorted(cpu for core in (*reserved, *slow) for cpu in core.cpus)
    placement = Placement(tuple(_rank(share) for share in shares), tuple(frontend) or None)
    why = ONE_PER_CORE.format(len(host.usable_cpus))
    if reserved:
        why += f", except {len(reserved)} for the front end"
    if helpers:
        why += f", with {len(helpers)} slower ones, which claim less of the work"
    if slow:
        why += f", without {len(slow)} slower cores, for which the others would wait"
    return placement, why


def _moving(
    options: EngineOptions,
    ledger: Ledger,
    host: Host,
    groups: Sequence[Sequence[Core]],
    ranks: int,
) -> tuple[Placement, str]:
    """Place threads under a quota below the CPUs (`quota_shares_cpus`), without pinning them.

    A rank is bound only to its nodes, so that its memory is near.
    The front end is bound only if an option reserved cores for it.
    """
    limit = quota_threads(host)
    assert limit is not None
    cores = [core for group in groups for core in group]
    used = compute_cores(cores, ranks)
    fast = [core for core in used if core not in slower(used)]
    if max(limit[0], ranks) <= len(fast):
        used = fast
    kept, reserved = by_node(used, [group[0].node for group in groups]), []
    if options.num_reserved_cpu is not None:
        reserved = _reserve(options.num_reserved_cpu, ledger, kept, False, 0, ranks)
        kept = [[core for core in group if core not in reserved] for group in kept]
    else:
        _core_for_each(ranks, len(used), ledger)
        why = "the kernel places the front end like the threads, under a CPU quota"
        ledger.decide("num_reserved_cpu", 0, why)
    shares = share_out(host, [group for group in kept if group], ranks)
    sizes, why = [len(share) for share in shares], ONE_PER_CORE.format(len(host.usable_cpus))
    if limit[0] <= sum(sizes):
        paid, why = _sizes(limit[0], ranks), limit[1]
        sizes = [min(size, n) for size, n in zip(sizes, paid, strict=True)]
    made = [_on_nodes(host, share, kept, n) for share, n in zip(shares, sizes, strict=True)]
    frontend = sorted(cpu for core in reserved for cpu in core.cpus)
    # The front end uses a part of the quota as well.
    passive = _passive(host) or (host.cgroup.cpu_quota or 0) < sum(sizes) + 1
    return Placement(tuple(made), tuple(frontend) or None, passive), why


def _on_nodes(
    host: Host, share: Sequence[Core], groups: Sequence[Sequence[Core]], threads: int
) -> Rank:
    """Return a rank with `threads` threads that may use all cores in the nodes of `share`."""
    nodes = tuple(dict.fromkeys(core.node for core in share))
    cpus = sorted(c for group in groups for core in group if core.node in nodes for c in core.cpus)
    within = None if len(cpus) == len(host.usable_cpus) else tuple(cpus)
    return Rank(threads, None, nodes, within)


def _rank(cores: Sequence[Core]) -> Rank:
    nodes = tuple(dict.fromkeys(core.node for core in cores))
    return Rank(len(cores), tuple(core.cpu for core in cores), nodes)


def _sizes(threads: int, ranks: int) -> list[int]:
    """Return the number of threads of each rank: `threads` in total, but at least one per rank."""
    return [max(1, threads // ranks + (i < threads % ranks)) for i in range(ranks)]


def _visible(options: EngineOptions, ledger: Ledger, host: Host) -> list[list[Core]]:
    """Return the cores of the requested nodes, in the requested order; by default, of all nodes."""
    groups = by_node(physical_cores(host))
    if options.visible_memory_nodes is None:
        return groups
    wanted = parse_nodes(options.visible_memory_nodes)
    here = [group[0].node for group in groups]
    missing = [node for node in wanted if node not in here]
    if missing:
        msg = (
            f"{ledger.asked('visible_memory_nodes')}: node {format_cpus(missing)} has no memory "
            f"with CPUs that this process may use; choose from {format_cpus(here)}"
        )
        raise ConfigError(msg)
    ledger.decide("visible_memory_nodes", format_cpus(wanted), "as requested, in rank order")
    return [groups[here.index(node)] for node in wanted]


def _reserve(
    asked: int | None,
    ledger: Ledger,
    groups: Sequence[Sequence[Core]],
    slow: bool,
    helpers: int,
    ranks: int,
) -> list[Core]:
    """Return the cores to reserve for the front end: the last cores of each node."""
    cores = sum(len(group) for group in groups)
    _core_for_each(ranks, cores, ledger)
    if asked is None:
        # If no number was requested, each node and each rank keeps at least one compute core.
        spare = [len(group) - 1 for group in groups]
        count = min(sum(min(1, most) for most in spare), cores - ranks)
        why = "one per NUMA node in use"
        if slow:
            count, why = 0, "the front end uses the slower cores"
        elif cores <= SMALL:
            count, why = 0, "too few cores to reserve one"
        elif helpers:
            count = min(max(1, helpers // FRONT_END_PART), cores - ranks)
            why = "of the slower cores, for the front end"
        elif count < len(groups):
            why += " that has more than one"
    else:
        count, why = asked, "as requested"
    if count > cores - ranks:
        least = "at least one has to compute" if ranks == 1 else f"{ranks} ranks need one each"
        msg = (
            f"{ledger.asked('num_reserved_cpu')}: this process may use {cores} cores and "
            f"{least}; give at most {cores - ranks}"
        )
        raise ConfigError(msg)
    ledger.decide("num_reserved_cpu", count, why)
    return take_from_tails(groups, count)


def _core_for_each(ranks: int, cores: int, ledger: Ledger) -> None:
    if ranks > cores:
        asked = ledger.asked("tensor_parallel_size", "data_parallel_size")
        msg = (
            f"{asked}: {ranks} ranks need a core each, but this process may compute on "
            f"{cores}; use at most {cores}"
        )
        raise ConfigError(msg)


def _nobind(
    options: EngineOptions, ledger: Ledger, host: Host, ranks: int
) -> tuple[Placement, str]:
    cores = physical_cores(host)
    limit = quota_threads(host)
    if options.omp_num_threads is not None:
        threads, why = options.omp_num_threads, "OMP_NUM_THREADS"
        sizes = [threads] * ranks
    else:
        _core_for_each(ranks, len(cores), ledger)
        threads, why = len(cores), "one per physical core"
        if limit is not None and limit[0] < threads:
            threads, why = limit
        sizes = _sizes(threads, ranks)
    nodes = tuple(sorted({core.node for core in cores}))
    return Placement(tuple(Rank(n, None, nodes) for n in sizes), None, _passive(host)), why


def _listed(
    lists: list[list[CpuId]], ledger: Ledger, host: Host, ranks: int
) -> tuple[Placement, str]:
    asked = ledger.asked("omp_threads_bind")
    every = [cpu for rank in lists for cpu in rank]
    if len(lists) != ranks:
        nearest = format_cpus(every)
        if ranks > 1:
            cut = [
                every[i * len(every) // ranks : (i + 1) * len(every) // ranks] for i in range(ranks)
            ]
            nearest = "|".join(format_cpus(part) for part in cut if part)
        msg = (
            f"{asked}: has {len(lists)} list(s) of CPUs, but {ranks} rank(s) need one each; "
            f"give {'one list' if ranks == 1 else 'a list for each'}, such as {nearest}"
        )
        raise ConfigError(msg)
    _check_cpus(every, asked, host)
    why = "one per CPU listed"
    limit = quota_threads(host)
    if limit is not None and limit[0] < len(every):
        why += f"; the CPU quota of {host.cgroup.cpu_quota:g} will stop them for a part of the time"
    node_of = {cpu: core.node for core in physical_cores(host) for cpu in core.cpus}
    made = [
        Rank(len(cpus), tuple(cpus), tuple(dict.fromkeys(node_of[c] for c in cpus)))
        for cpus in lists
    ]
    return Placement(tuple(made), None, _passive(host)), why


def _check_cpus(cpus: Sequence[CpuId], asked: str, host: Host) -> None:
    usable = [c.id for c in host.usable_cpus]
    outside = sorted(set(cpus) - set(usable))
    if outside:
        msg = (
            f"{asked}: CPU {format_cpus(outside)} is not among the CPUs this process may use "
            f"({format_cpus(usable)}), which the affinity mask or the container limits; "
            "give CPUs from that list"
        )
        raise ConfigError(msg)
    twice = sorted({cpu for cpu in cpus if cpus.count(cpu) > 1})
    if twice:
        msg = f"{asked}: CPU {format_cpus(twice)} is listed more than once; list each CPU once"
        raise ConfigError(msg)


def _only_auto(options: EngineOptions, ledger: Ledger) -> None:
    """Record that options for automatic binding have no effect with another kind of binding."""
    why = "has an effect with automatic binding only"
    if options.num_reserved_cpu is not None:
        ledger.decide("num_reserved_cpu", 0, why)
    if options.visible_memory_nodes is not None:
        ledger.decide("visible_memory_nodes", "no effect", why)
