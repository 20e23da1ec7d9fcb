"""Physical cores grouped by NUMA node, and ways to divide them among ranks; pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cpuserve.base.ids import CpuId, NodeId
from cpuserve.platforms.host import Cpu, Host, Node

# Slower cores compute as well if they add at least an eighth to the work of the fast cores,
# and have at least a third of the speed of fast cores.
# Otherwise the waiting for slower cores costs more time than they save (docs/performance.md).
WORTH_HELP, LEAST_SPEED = 1 / 8, 1 / 3
ALIKE = 0.9  # cores of one class have at least this part of the top capacity, as clocks differ
# A node is on another socket if it is FAR times as distant as a node is from itself, or more.
# Firmware reports 1.1 or 1.2 for the parts of a socket (SNC, NPS4), and 2 or more for sockets.
# Firmware reports 1.6 for the dies of a first EPYC, which are as slow to reach as a socket.
# The kernel reports 1 for the parts of one memory (numa=fake).
FAR = 1.5


@dataclass(frozen=True, slots=True)
class Core:
    """The CPUs of one physical core that this process may use, lowest first.

    node: the NUMA node of the core, or the nearest node with memory if that node has none.
    capacity: work per time; 1024 for the fastest cores of the machine.
    """

    cpus: tuple[CpuId, ...]
    node: NodeId
    capacity: int = 1024
    l3: int = -1

    @property
    def cpu(self) -> CpuId:
        """The CPU of the compute thread on this core."""
        return self.cpus[0]


def physical_cores(host: Host) -> list[Core]:
    """Return all cores with a usable CPU, sorted by node, L3 group and lowest CPU."""
    siblings: dict[int, list[Cpu]] = {}
    for cpu in host.usable_cpus:
        siblings.setdefault(cpu.core, []).append(cpu)
    near = nearest_memory(host)
    cores = [_core(cpus, near) for cpus in siblings.values()]
    return sorted(cores, key=lambda core: (core.node, core.l3, core.cpu))


def _core(cpus: Sequence[Cpu], near: Mapping[NodeId, NodeId]) -> Core:
    first = cpus[0]
    node = near.get(first.node, first.node)
    return Core(tuple(c.id for c in cpus), node, first.capacity, first.l3)


def core_complexes(host: Host, cpus: Sequence[CpuId] | None) -> list[int]:
    """Return for each of `cpus` the number of its L3 cache, which CPUs share; [] for None."""
    l3 = {cpu.id: cpu.l3 for cpu in host.cpus}
    return [l3[cpu] for cpu in cpus or ()]


def nearest_memory(host: Host) -> dict[NodeId, NodeId]:
    """Return node -> the node with the memory that its cores use.

    A node without memory for this process uses the nearest node that has some.
    If no node reports its memory (a container without these files), every node uses its own memory.
    """
    allowed = host.memory_nodes or [n.id for n in host.nodes]
    rich = [n for n in host.nodes if n.memory_total > 0 and n.id in allowed]
    if not rich:
        return {n.id: n.id for n in host.nodes}
    ids = [n.id for n in host.nodes]
    return {n.id: n.id if n in rich else _nearest(n, rich, ids) for n in host.nodes}


def _nearest(node: Node, rich: Sequence[Node], ids: Sequence[NodeId]) -> NodeId:
    distance = dict(zip(ids, node.distances, strict=False))
    return min(rich, key=lambda other: (distance.get(other.id, 255), other.id)).id


def sockets(host: Host) -> dict[NodeId, NodeId]:
    """Return node -> the first node of its socket: nodes nearer than FAR are on one socket.

    If the kernel reports no distances, nodes with CPUs of the same package are on one socket.
    """
    package = {cpu.node: cpu.package for cpu in host.cpus}
    first: dict[NodeId, NodeId] = {}
    for at, node in enumerate(host.nodes):
        first[node.id] = node.id
        for other, distance in zip(host.nodes[:at], node.distances, strict=False):
            if distance < FAR * node.distances[at]:
                first[node.id] = first[other.id]
                break
        if not node.distances:
            same = [n for n in first if package.get(n) == package.get(node.id, -1)]
            first[node.id] = first[same[0]] if same else node.id
    return first


def by_socket(host: Host, groups: Sequence[Sequence[Core]]) -> list[list[Core]]:
    """Return the cores of each socket; `groups` has the cores of each node."""
    first = sockets(host)
    joined: dict[NodeId, list[Core]] = {}
    for group in groups:
        node = group[0].node
        joined.setdefault(first.get(node, node), []).extend(group)
    return list(joined.values())


def by_node(cores: Sequence[Core], order: Sequence[NodeId] | None = None) -> list[list[Core]]:
    """Return the cores of each node, in `order` or sorted by node number, without empty nodes."""
    nodes = sorted({c.node for c in cores}) if order is None else order
    groups = [[c for c in cores if c.node == node] for node in nodes]
    return [group for group in groups if group]


def worth_using(cores: Sequence[Core]) -> list[Core]:
    """Return the cores that are fastest together if each core gets an equal part of the work.

    All cores wait at a barrier for the slowest one, so slow cores help only if there are many:
    8 fast cores with 8 cores of half the speed are as fast as the 8 fast cores alone.
    If two choices are equally fast, the one with fewer cores is taken.
    """
    best: list[Core] = []
    for least in sorted({c.capacity for c in cores}, reverse=True):
        kept = [c for c in cores if c.capacity >= least]
        if not best or len(kept) * least > len(best) * min(c.capacity for c in best):
            best = kept
    return best


def compute_cores(cores: Sequence[Core], ranks: int) -> list[Core]:
    """Return the cores that `ranks` ranks compute on.

    The threads of one rank claim work in small parts, so slower cores do less. They help
    unless they are too slow, because all cores wait for the part that a slow core claims last.
    With several ranks, each rank has an equal part of the work.
    """
    best = worth_using(cores)
    if ranks > 1:
        return best
    fastest = max((core.capacity for core in best), default=0)
    more = [c for c in cores if c not in best and c.capacity >= LEAST_SPEED * fastest]
    gain = sum(core.capacity for core in more) / max(1, sum(core.capacity for core in best))
    return [*best, *more] if gain >= WORTH_HELP else best


def slower(cores: Sequence[Core]) -> list[Core]:
    """Return the cores of a slower class than the fastest core, not only of a lower clock."""
    fastest = max((core.capacity for core in cores), default=0)
    return [core for core in cores if core.capacity < ALIKE * fastest]


def thread_speeds(host: Host, cpus: Sequence[CpuId] | None) -> list[int]:
    """Return the capacity (work per time) of each of `cpus`; [] if all are equal."""
    capacity = {cpu.id: cpu.capacity for cpu in host.cpus}
    speeds = [capacity[cpu] for cpu in cpus or ()]
    return speeds if len(set(speeds)) > 1 else []


def runs(cores: Sequence[Core], count: int) -> list[list[Core]]:
    """Return `cores` divided into `count` contiguous runs; the longer runs come first."""
    size, longer = divmod(len(cores), count)
    cut: list[list[Core]] = []
    at = 0
    for i in range(count):
        end = at + size + (i < longer)
        cut.append(list(cores[at:end]))
        at = end
    return cut


def share_out(host: Host, nodes: Sequence[Sequence[Core]], ranks: int) -> list[list[Core]]:
    """Return the cores of each rank: several ranks divide a node, or a rank spans nodes.

    A rank may span nodes (of one socket if there are enough ranks),
    because each thread places the weights that it reads in near memory. With enough ranks,
    each rank stays inside a node, so that its activations are in near memory as well.
    """
    groups = nodes if ranks >= len(nodes) else by_socket(host, nodes)
    if ranks < len(groups):
        return runs([core for group in groups for core in group], ranks)
    counts = apportion(ranks, [len(group) for group in groups])
    return [run for group, n in zip(groups, counts, strict=True) for run in runs(group, n)]


def apportion(ranks: int, sizes: Sequence[int]) -> list[int]:
    """Return the number of ranks on each node: at least one, and more on nodes with more cores."""
    shares = [1] * len(sizes)
    for _ in range(ranks - len(sizes)):
        open_ = [i for i in range(len(sizes)) if shares[i] < sizes[i]]
        shares[max(open_, key=lambda i: (sizes[i] / (shares[i] + 1), -i))] += 1
    return shares


def take_from_tails(groups: Sequence[Sequence[Core]], count: int) -> list[Core]:
    """Take `count` cores from the ends of the groups, equally many from each group if possible.

    If the number does not divide evenly, the largest groups lose one more core, and of groups
    of equal size the later groups.
    The last core of a group is taken only if no other group has more than one.
    """
    left = [list(group) for group in groups]
    taken: list[Core] = []
    given = [0] * len(left)
    for _ in range(count):
        i = max(range(len(left)), key=lambda i: (len(left[i]) > 1, -given[i], len(left[i]), i))
        taken.append(left[i].pop())
        given[i] += 1
    return taken
