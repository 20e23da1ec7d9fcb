"""How many ranks and engines share the NUMA nodes of a machine, and why; pure.

One group of threads may span the nodes ("off"), with its pages where they are first touched or on
all nodes in turn ("interleave"); a model may be split over a rank on each ("tp"); each may have an
engine with a copy of its own ("replicas"); or all but one may be left alone, when neither pays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cpuserve.config.decisions import Ledger
from cpuserve.config.engine import EngineOptions
from cpuserve.config.values import format_bytes, parse_bind, parse_nodes
from cpuserve.errors import ConfigError
from cpuserve.ids import NodeId
from cpuserve.platforms.base import ModelFacts
from cpuserve.platforms.host import Host
from cpuserve.platforms.memory import leaves_room
from cpuserve.platforms.placement import quota_threads
from cpuserve.platforms.replicas import share_of
from cpuserve.platforms.topology import Core, by_node, physical_cores, worth_using

# What decides whether a token is sooner ready from several nodes than from one (est.: a socket with
# eight channels of DDR5, and a cache line that goes to another socket and back).
NODE_READ_BYTES_PER_S = 200e9
MEETING_S = 2e-6  # what a barrier over several nodes takes longer than one inside a node
MEETINGS = 4  # barriers of a layer
# Engines of their own answer as many times the requests as there are nodes; ranks answer each of
# them sooner, and are worth more as long as they lose no more than a quarter of that to waiting.
WORTH_SPLITTING = 0.75


@dataclass(frozen=True, slots=True)
class Layout:
    """`ranks` of each of `replicas` engines.

    nodes: the only ones to compute on, None = all. interleave: nodes whose memory is taken in turn.
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
    """What --numa, --tensor-parallel-size and --data-parallel-size come to; numbers asked for stay.

    weights: bytes of the packed model.

    Raises:
        ConfigError: numbers this machine or executor cannot honour, or wishes that exclude another.
    """
    machine = _Machine(options, host, facts, executor, weights)
    layout, chosen, why = _choose(machine, ledger)
    if options.numa is not None:
        ledger.decide("numa", chosen, why)
    _check_ranks(options, ledger, layout.ranks, executor, why, len(machine.groups))
    _check_replicas(ledger, layout.replicas, host)
    return layout


def ranks_of_nodes(options: EngineOptions, host: Host) -> int:
    """The ranks of a model about which nothing is known: what was asked, or a large one's."""
    if options.tensor_parallel_size == "auto" or options.numa == "tp":
        return len(_groups(options, host))
    return options.tensor_parallel_size or 1


@dataclass(frozen=True, slots=True)
class _Machine:
    """What the choice depends on."""

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
        """Asked for as a number."""
        asked = self.options.tensor_parallel_size
        return asked if isinstance(asked, int) else None

    @property
    def replicas(self) -> int | None:
        return self.options.data_parallel_size

    @property
    def mode(self) -> str:
        automatic = self.options.tensor_parallel_size == "auto"
        return self.options.numa or ("auto" if automatic else "off")


_Choice = tuple[Layout, str, str]  # and what it is called, and why


def _choose(machine: _Machine, ledger: Ledger) -> _Choice:
    mode, nodes = machine.mode, machine.nodes
    asked = Layout(machine.ranks or 1, machine.replicas or 1)
    if mode == "off":
        return asked, "off", "memory is where threads first touch it, on any node"
    if mode == "interleave":
        return _interleaved(machine, ledger, asked)
    bind = parse_bind(machine.options.omp_threads_bind or "auto")
    if isinstance(bind, list):
        ranks = machine.ranks or max(1, len(bind) // asked.replicas)
        return Layout(ranks, asked.replicas), "tp", "one for each list of CPUs"
    if bind == "nobind":
        return asked, "off", "threads that are not bound have no node"
    if len(nodes) == 1:
        return asked, "off", "there is one NUMA node to use"
    if mode == "replicas":
        if machine.replicas is not None:
            why = "as many engines as --data-parallel-size says (one, where the caller runs it)"
            return asked, "replicas", why
        made = Layout(asked.ranks, len(nodes))
        return made, "replicas", "an engine for each NUMA node, as asked"
    if mode == "tp" or machine.ranks is not None:
        ranks = machine.ranks or max(1, len(nodes) // asked.replicas)
        return Layout(ranks, asked.replicas), "tp", f"{len(nodes)} NUMA nodes, as asked"
    return _automatic(machine)


def _interleaved(machine: _Machine, ledger: Ledger, asked: Layout) -> _Choice:
    if asked.ranks > 1:
        msg = (
            f"{ledger.asked('numa')}: spreads the pages of one rank, and {asked.ranks} keep theirs "
            f"to themselves; give --numa tp, or leave --tensor-parallel-size out"
        )
        raise ConfigError(msg)
    if len(machine.nodes) == 1:
        return asked, "off", "there is one NUMA node to use"
    made = Layout(1, asked.replicas, interleave=machine.nodes)
    return made, "interleave", f"pages alternate between {len(machine.nodes)} NUMA nodes, as asked"


def _automatic(machine: _Machine) -> _Choice:
    """Ranks where the model gains by them, else engines where copies fit, else one node."""
    count = len(machine.nodes)
    largest = max(machine.groups, key=len)
    one = Layout(1, machine.replicas or 1, (largest[0].node,))
    limit = quota_threads(machine.host)
    if limit is not None and limit[0] <= len(largest) and one.replicas == 1:
        return one, "one node", f"{limit[0]} threads fit on one NUMA node: {limit[1]}"
    if machine.executor != "native":
        return one, "one node", f"the {machine.executor} executor does not split a model"
    ranks = max(1, count // one.replicas)
    pays, why = _splitting_pays(machine, ranks)
    if pays:
        return Layout(ranks, one.replicas), "tp", f"{count} NUMA nodes: {why}"
    if machine.replicas is not None:
        only = one.nodes if one.replicas == 1 else None
        return Layout(1, one.replicas, only), "one node" if only else "replicas", why
    if leaves_room(share_of(machine.host, count), machine.weights):
        return Layout(1, count), "replicas", f"an engine for each of {count} NUMA nodes: {why}"
    return one, "one node", f"{why}, and {count} copies do not fit in memory"


def _splitting_pays(machine: _Machine, ranks: int) -> tuple[bool, str]:
    """Whether a token comes so much sooner from `ranks` nodes that engines are not better."""
    alone = machine.weights / NODE_READ_BYTES_PER_S
    meetings = len(machine.facts.kv_layers) * MEETINGS * MEETING_S
    gain = alone / (alone / ranks + (meetings if ranks > 1 else 0.0))
    of = f"{format_bytes(machine.weights)} of weights, at {gain:.1f} times the rate of one (est.)"
    if ranks > 1 and gain >= WORTH_SPLITTING * ranks:
        return True, f"{ranks} ranks share {of}"
    return False, f"too small to split: {ranks} ranks would share {of}"


def _groups(options: EngineOptions, host: Host) -> list[list[Core]]:
    """The compute cores of each node that may be used."""
    groups = by_node(worth_using(physical_cores(host)))
    if options.visible_memory_nodes is None:
        return groups
    wanted: Sequence[NodeId] = parse_nodes(options.visible_memory_nodes)
    # A wrong one is told where threads are placed.
    return [group for group in groups if group[0].node in wanted] or groups


def _check_ranks(
    options: EngineOptions, ledger: Ledger, ranks: int, executor: str, why: str, nodes: int
) -> None:
    if ranks > 1 and executor != "native":
        msg = (
            f"{ledger.asked('tensor_parallel_size')}: the {executor} executor does not split a "
            f"model; use 1"
        )
        raise ConfigError(msg)
    asked = isinstance(options.tensor_parallel_size, int)
    reason = "one group of threads over all cores"
    if ranks > 1:
        reason = "groups of threads, each with its part of the model in its own memory"
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
        reason = "engines, each with the model, cores of its own and an equal part of the memory"
        if replicas > nodes:
            reason += f"; {nodes} would be faster here: "
            reason += "those that share a node read its memory twice"
        ledger.decide("data_parallel_size", replicas, reason)
