"""Decide how many ranks and engines use the NUMA nodes of a machine. Pure functions.

The modes: one group of threads spans the nodes, with pages where they are first touched ("off") or
alternating between nodes ("interleave"); the model is split over one rank per node ("tp"); each
node has an engine with a copy of the model ("replicas"); or only one node is used, if neither of
the last two is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cpuserve.config.decisions import Ledger
from cpuserve.config.options import EngineOptions
from cpuserve.config.values import format_bytes, parse_bind, parse_nodes
from cpuserve.errors import ConfigError
from cpuserve.ids import NodeId
from cpuserve.platforms.base import ModelFacts
from cpuserve.platforms.host import Host
from cpuserve.platforms.memory import fits_twice
from cpuserve.platforms.placement import quota_shares_cpus, quota_threads
from cpuserve.platforms.replicas import share_of
from cpuserve.platforms.topology import Core, by_node, physical_cores, worth_using

# Estimates that decide whether several nodes compute a token faster than one: the bandwidth of a
# socket with eight channels of DDR5, and the round trip of a cache line to another socket.
NODE_READ_BYTES_PER_S = 200e9
MEETING_S = 2e-6  # extra time of a barrier over several nodes, compared with one inside a node
MEETINGS = 4  # barriers per layer
# N replicas have N times the throughput of one node. N ranks have a lower latency, and are
# preferred if their throughput is at least this share of it.
WORTH_SPLITTING = 0.75


@dataclass(frozen=True, slots=True)
class Layout:
    """`ranks` of each of `replicas` engines.

    nodes: NUMA nodes to compute on, None = all. interleave: nodes between which pages alternate.
    """

    ranks: int = 1
    replicas: int = 1
    nodes: tuple[NodeId, ...] | None = None
    interleave: tuple[NodeId, ...] = ()


def lay_out(
    options: EngineOptions,
    ledger: Ledger,
    host: Host,
    facts: ModelFacts,
    *,
    executor: str,
    weights: int,
) -> Layout:
    """Decide --numa, --tensor-parallel-size and --data-parallel-size; requested numbers are kept.

    weights: bytes of the packed model.

    Raises:
        ConfigError: this machine or executor cannot honour a number, or options exclude each other.
    """
    machine = _Machine(options, host, facts, executor, weights)
    layout, chosen, why = _choose(machine, ledger)
    if options.numa is not None:
        ledger.decide("numa", chosen, why)
    _check_ranks(options, ledger, layout.ranks, executor, why, len(machine.groups))
    _check_replicas(ledger, layout.replicas, host)
    return layout


def ranks_of_nodes(options: EngineOptions, host: Host) -> int:
    """Return the requested ranks, or those of a large model, while the model is not known."""
    if options.tensor_parallel_size == "auto" or options.numa == "tp":
        return len(_groups(options, host))
    return options.tensor_parallel_size or 1


@dataclass(frozen=True, slots=True)
class _Machine:
    """The facts that the choice depends on."""

    options: EngineOptions
    host: Host
    facts: ModelFacts
    executor: str
    weights: int

    @property
    def groups(self) -> list[list[Core]]:
        return _groups(self.options, self.host)

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        return tuple(group[0].node for group in self.groups)

    @property
    def ranks(self) -> int | None:
        """The requested number of ranks; None if none or "auto" was requested."""
        asked = self.options.tensor_parallel_size
        return asked if isinstance(asked, int) else None

    @property
    def replicas(self) -> int | None:
        return self.options.data_parallel_size

    @property
    def mode(self) -> str:
        automatic = self.options.tensor_parallel_size == "auto"
        return self.options.numa or ("auto" if automatic else "off")


_Choice = tuple[Layout, str, str]  # the layout, its name, the reason


def _choose(machine: _Machine, ledger: Ledger) -> _Choice:
    mode, nodes = machine.mode, machine.nodes
    asked = Layout(machine.ranks or 1, machine.replicas or 1)
    if mode == "off":
        return asked, "off", "pages are on the node that first touches them"
    if mode == "interleave":
        return _interleaved(machine, ledger, asked)
    bind = parse_bind(machine.options.omp_threads_bind or "auto")
    if isinstance(bind, list):
        ranks = machine.ranks or max(1, len(bind) // asked.replicas)
        return Layout(ranks, asked.replicas), "tp", "one rank for each list of CPUs"
    if bind == "nobind":
        return asked, "off", "threads are not bound to nodes"
    if len(nodes) == 1:
        return asked, "off", "only one NUMA node can be used"
    if mode == "replicas":
        if machine.replicas is not None:
            why = "as many engines as --data-parallel-size says (one inside a Python program)"
            return asked, "replicas", why
        made = Layout(asked.ranks, len(nodes))
        return made, "replicas", "an engine for each NUMA node, as requested"
    if mode == "tp" or machine.ranks is not None:
        ranks = machine.ranks or max(1, len(nodes) // asked.replicas)
        return Layout(ranks, asked.replicas), "tp", f"{len(nodes)} NUMA nodes, as requested"
    return _automatic(machine)


def _interleaved(machine: _Machine, ledger: Ledger, asked: Layout) -> _Choice:
    if asked.ranks > 1:
        msg = (
            f"{ledger.asked('numa')}: spreads the pages of a single rank over the nodes, but "
            f"{asked.ranks} were requested; give --numa tp, or leave --tensor-parallel-size out"
        )
        raise ConfigError(msg)
    if len(machine.nodes) == 1:
        return asked, "off", "only one NUMA node can be used"
    made = Layout(1, asked.replicas, interleave=machine.nodes)
    return (
        made,
        "interleave",
        (f"pages alternate between {len(machine.nodes)} NUMA nodes, as requested"),
    )


def _automatic(machine: _Machine) -> _Choice:
    """Choose ranks if they are fast enough, else replicas if copies fit, else one node."""
    count = len(machine.nodes)
    largest = max(machine.groups, key=lambda cores: (len(cores), _room(machine.host, cores)))
    one = Layout(1, machine.replicas or 1, (largest[0].node,))
    limit = quota_threads(machine.host)
    if limit is not None and limit[0] <= len(largest) and one.replicas == 1:
        return one, "one node", f"{limit[0]} threads fit on one NUMA node: {limit[1]}"
    if machine.executor != "native":
        return one, "one node", f"the {machine.executor} executor cannot split a model"
    ranks = max(1, count // one.replicas)
    pays, why = _splitting_pays(machine, ranks)
    if pays:
        return Layout(ranks, one.replicas), "tp", f"{count} NUMA nodes: {why}"
    if machine.replicas is not None:
        only = one.nodes if one.replicas == 1 else None
        return Layout(1, one.replicas, only), "one node" if only else "replicas", why
    if fits_twice(share_of(machine.host, count), machine.weights):
        return Layout(1, count), "replicas", f"an engine for each of {count} NUMA nodes: {why}"
    return one, "one node", f"{why}, and {count} copies do not fit in memory"


def _room(host: Host, cores: Sequence[Core]) -> int:
    """Return the free memory of the node, by which equal nodes are told apart under a CPU quota.

    Servers of other containers chose between the same nodes, and the memory shows where they are.
    """
    if not quota_shares_cpus(host):
        return 0
    return sum(node.memory_available for node in host.nodes if node.id == cores[0].node)


def _splitting_pays(machine: _Machine, ranks: int) -> tuple[bool, str]:
    """Return (whether `ranks` ranks are better than as many replicas, the reason)."""
    alone = machine.weights / NODE_READ_BYTES_PER_S
    meetings = len(machine.facts.kv_layers) * MEETINGS * MEETING_S
    gain = alone / (alone / ranks + (meetings if ranks > 1 else 0.0))
    of = f"{format_bytes(machine.weights)} of weights, at {gain:.1f} times the rate of one (est.)"
    if ranks > 1 and gain >= WORTH_SPLITTING * ranks:
        return True, f"{ranks} ranks share {of}"
    return False, f"too small to split: {ranks} ranks would share {of}"


def _groups(options: EngineOptions, host: Host) -> list[list[Core]]:
    """Return the compute cores of each usable node."""
    groups = by_node(worth_using(physical_cores(host)))
    if options.visible_memory_nodes is None:
        return groups
    wanted: Sequence[NodeId] = parse_nodes(options.visible_memory_nodes)
    # placement.py reports nodes that do not exist.
    return [group for group in groups if group[0].node in wanted] or groups


def _check_ranks(
    options: EngineOptions, ledger: Ledger, ranks: int, executor: str, why: str, nodes: int
) -> None:
    if ranks > 1 and executor != "native":
        msg = (
            f"{ledger.asked('tensor_parallel_size')}: the {executor} executor cannot split a "
            f"model; use 1"
        )
        raise ConfigError(msg)
    asked = isinstance(options.tensor_parallel_size, int)
    reason = "one group of threads over all cores"
    if ranks > 1:
        reason = "groups of threads, each with a part of the model in the memory of its node"
    if not asked and (options.numa or options.tensor_parallel_size == "auto"):
        reason = f"{reason}; {why}" if ranks > 1 else why
    elif not asked and nodes > 1:
        reason += f" of {nodes} NUMA nodes; --numa auto may use them better"
    ledger.decide("tensor_parallel_size", ranks, reason)


def _check_replicas(ledger: Ledger, replicas: int, host: Host) -> None:
    cores = physical_cores(host)
    nodes = len({core.node for core in cores})
    if replicas > len(cores):
        msg = (
            f"{ledger.asked('data_parallel_size')}: each engine needs a core of its own and this "
            f"process may use {len(cores)}; use at most {len(cores)}"
        )
        raise ConfigError(msg)
    if replicas > 1:
        reason = (
            "engines, each with a copy of the model, its own cores and an equal part of the memory"
        )
        if replicas > nodes:
            reason += f"; {nodes} would be faster: engines on one node compete for its bandwidth"
        ledger.decide("data_parallel_size", replicas, reason)
