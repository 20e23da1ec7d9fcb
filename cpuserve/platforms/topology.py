"""Physical cores grouped by the memory they are near, and ways to share them out; all pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cpuserve.ids import CpuId, NodeId
from cpuserve.platforms.host import Cpu, Host, Node


@dataclass(frozen=True, slots=True)
class Core:
    """The CPUs of one physical core this process may use, lowest first.

    node: where its memory is: its own node, or the nearest one where that has none. capacity: work
    it does in a given time, 1024 for the machine's fastest cores.
    """

    cpus: tuple[CpuId, ...]
    node: NodeId
    capacity: int = 1024
    l3: int = -1

    @property
    def cpu(self) -> CpuId:
        """Where its one compute thread runs."""
        return self.cpus[0]


def physical_cores(host: Host) -> list[Core]:
    """Every core with a usable CPU, by node, then L3 group, then lowest CPU."""
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


def nearest_memory(host: Host) -> dict[NodeId, NodeId]:
    """Node -> the node its memory comes from.

    A node without memory, or with none this process may take, uses the nearest that has some. Where
    no node tells its memory (a container without these files), every node counts as having its own.
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


def by_node(cores: Sequence[Core], order: Sequence[NodeId] | None = None) -> list[list[Core]]:
    """The cores of each node, in the order given (by number if none), without empty nodes."""
    nodes = sorted({c.node for c in cores}) if order is None else order
    groups = [[c for c in cores if c.node == node] for node in nodes]
    return [group for group in groups if group]


def worth_using(cores: Sequence[Core]) -> list[Core]:
    """The cores that do most together when each gets an equal part.

    All wait at a barrier for the slowest, so a class of slow cores pays only where it is numerous:
    8 fast and 8 half as fast are as quick as the 8 alone. Fewer threads win a tie.
    """
    best: list[Core] = []
    for least in sorted({c.capacity for c in cores}, reverse=True):
        kept = [c for c in cores if c.capacity >= least]
        if not best or len(kept) * least > len(best) * min(c.capacity for c in best):
            best = kept
    return best


def runs(cores: Sequence[Core], count: int) -> list[list[Core]]:
    """`cores` cut into `count` contiguous runs, longer ones first."""
    size, longer = divmod(len(cores), count)
    cut: list[list[Core]] = []
    at = 0
    for i in range(count):
        end = at + size + (i < longer)
        cut.append(list(cores[at:end]))
        at = end
    return cut


def share_out(groups: Sequence[Sequence[Core]], ranks: int) -> list[list[Core]]:
    """The cores of each rank: ranks that share a node split it, fewer ranks than nodes span them.

    Threads place what they read near themselves, so a rank may span nodes; it is kept inside one
    where there are enough ranks, because its activations are then read from nearby.
    """
    if ranks < len(groups):
        return runs([core for group in groups for core in group], ranks)
    counts = apportion(ranks, [len(group) for group in groups])
    return [run for group, n in zip(groups, counts, strict=True) for run in runs(group, n)]


def apportion(ranks: int, sizes: Sequence[int]) -> list[int]:
    """How many of `ranks` each node of `sizes` cores gets: one at least, then by size."""
    shares = [1] * len(sizes)
    for _ in range(ranks - len(sizes)):
        open_ = [i for i in range(len(sizes)) if shares[i] < sizes[i]]
        shares[max(open_, key=lambda i: (sizes[i] / (shares[i] + 1), -i))] += 1
    return shares


def take_from_tails(groups: Sequence[Sequence[Core]], count: int) -> list[Core]:
    """`count` cores from the tails of the groups, as many from each as can be.

    Where it does not divide the largest give first, of equal ones the last. Each keeps one core for
    as long as another has more.
    """
    left = [list(group) for group in groups]
    taken: list[Core] = []
    given = [0] * len(left)
    for _ in range(count):
        i = max(range(len(left)), key=lambda i: (len(left[i]) > 1, -given[i], len(left[i]), i))
        taken.append(left[i].pop())
        given[i] += 1
    return taken
