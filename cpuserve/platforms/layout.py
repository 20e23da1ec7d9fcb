"""Decide how many ranks and engines use the NUMA nodes of a machine, with pure functions.

There are four modes. "off": one group of threads spans the nodes, with pages where they are first
touched. "interleave": the same, with pages that alternate between nodes. "tp": one rank per node
has a part of the model. "replicas": each node has an engine with a copy of the model.

"auto" chooses between the last two modes, but for sockets instead of nodes.
The parts of a socket (SNC, NPS4) reach each other's memory nearly as fast as their own,
and a rank that spans them has its pages in near memory by first touch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cpuserve.base.errors import ConfigError
from cpuserve.base.ids import NodeId
from cpuserve.config.decisions import Ledger
from cpuserve.config.options import EngineOptions
from cpuserve.config.values import format_bytes, parse_bind, parse_nodes
from cpuserve.platforms.base import ModelFacts
from cpuserve.platforms.host import Host
from cpuserve.platforms.memory import copy_fits
from cpuserve.platforms.placement import quota_shares_cpus, quota_threads
from cpuserve.platforms.replicas import share_of
from cpuserve.platforms.topology import (
    Core,
    by_node,
    by_socket,
    physical_cores,
    worth_using,
)

# Estimates that decide whether several sockets compute a token faster than one socket:
# the bandwidth of a socket with eight channels of DDR5,
# and the round trip of a cache line to another socket.
SOCKET_READ_BYTES_PER_S = 200e9
MEETING_S = 2e-6  # extra seconds of a barrier if it spans several sockets
# Engines get new requests in turn, so all engines should be about equally fast.
ALIKE_SOCKETS = 0.75  # the least ratio of cores: smallest socket / largest socket
ONE_SOCKET = "the {} NUMA nodes are parts of one socket"


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout of `replicas` engines with `ranks` ranks each.

    nodes: the NUMA nodes that compute, None = all nodes.
    interleave: the nodes that pages alternate between.
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
        ConfigError: this machine or executor cannot use a number, or options exclude each other.
    """
    machine = _Machine(options, host, facts, executor, weights)
    layout, chosen, why = _choose(machine, ledger)
    if options.numa is not None or len(machine.groups) > 1:
        ledger.decide("numa", chosen, why)
    _check_ranks(options, ledger, layout, executor, why)
    _check_replicas(ledger, layout.replicas, host)
    return layout


def ranks_of_nodes(options: EngineOptions, host: Host) -> int:
    """Return the requested number of ranks, or the number for a large model of unknown size."""
    if isinstance(options.tensor_parallel_size, int):
        return options.tensor_parallel_size
    mode, _ = _mode(options, host)
    if mode not in ("auto", "tp"):
        return 1
    groups = _groups(options, host)
    split = groups if mode == "tp" else by_socket(host, groups)
    return max(1, len(split) // (options.data_parallel_size or 1))


def numa_notes(options: EngineOptions, host: Host) -> list[str]:
    """Return lines on how a server would use several nodes, for a model that is not known yet."""
    groups = _groups(options, host)
    mode, why = _mode(options, host)
    if len(groups) == 1:
        return []
    if mode == "auto":
        count = len(by_socket(host, groups))
        why = f"a rank on each of {count} sockets, or an engine if the model is small"
        if count == 1:
            mode, why = "off", ONE_SOCKET.format(len(groups))
    return [f"--numa {mode}: {why}" if why else f"--numa {mode}"]


def _mode(options: EngineOptions, host: Host) -> tuple[str, str]:
    """Return (the mode that was requested or is the default, the reason if this is "off")."""
    if options.numa is not None:
        return options.numa, ""
    if options.tensor_parallel_size == "auto":
        return "auto", ""
    if (options.omp_threads_bind or "auto") != "auto":
        return "off", "CPUs are given by --omp-threads-bind"
    if quota_shares_cpus(host):
        # Servers in other containers could choose the same socket,
        # and leave the other sockets idle.
        return "off", "the CPU quota is below the CPUs, so the kernel chooses between sockets"
    return "auto", ""


@dataclass(frozen=True, slots=True)
class _Machine:
    """The facts that the choice of a layout depends on."""

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
    def sockets(self) -> list[list[Core]]:
        return by_socket(self.host, self.groups)

    @property
    def ranks(self) -> int | None:
        """The requested number of ranks; None if it was not requested, or "auto"."""
        asked = self.options.tensor_parallel_size
        return asked if isinstance(asked, int) else None

    @property
    def replicas(self) -> int | None:
        return self.options.data_parallel_size


_Choice = tuple[Layout, str, str]  # (the layout, the name of its mode, the reason for it)


def _choose(machine: _Machine, ledger: Ledger) -> _Choice:
    mode, why = _mode(machine.options, machine.host)
    nodes = machine.nodes
    asked = Layout(machine.ranks or 1, machine.replicas or 1)
    if mode == "off":
        return asked, "off", why or "pages are on the node that first touches them"
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
    if machine.ranks is not None:
        return asked, "tp" if asked.ranks > 1 else "off", "as many ranks as requested"
    if mode == "tp":
        ranks = max(1, len(nodes) // asked.replicas)
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
    """Choose between a rank and an engine for each socket; "off" if there is only one socket."""
    sockets, engines = machine.sockets, machine.replicas or 1
    if len(sockets) == 1:
        return Layout(1, engines), "off", ONE_SOCKET.format(len(machine.nodes))
    if machine.executor != "native":
        why = f"the {machine.executor} executor cannot split a model"
        return Layout(1, engines), "off", why
    largest = max(sockets, key=lambda cores: (len(cores), _room(machine.host, cores)))
    limit = quota_threads(machine.host)
    if limit is not None and limit[0] <= len(largest) and engines == 1:
        only = Layout(1, 1, _nodes_of(largest))
        return only, "one node", f"{limit[0]} threads fit on one NUMA node: {limit[1]}"
    if engines > 1:
        ranks = max(1, len(sockets) // engines)
        why = f"{engines} engines as requested, on {len(sockets)} sockets"
        return Layout(ranks, engines), "tp" if ranks > 1 else "replicas", why
    return _ranks_or_replicas(machine, sockets)


def _ranks_or_replicas(machine: _Machine, sockets: Sequence[Sequence[Core]]) -> _Choice:
    """Choose ranks or engines for N sockets: the layout with the smaller disadvantage.

    Compared with one socket, N engines have N times the throughput,
    and the same speed for a single request. N ranks multiply both throughput and speed by `gain`.
    Engines are therefore slower for a single request by the factor `gain`,
    and ranks have less throughput by the factor N / gain. Engines are chosen if gain < N / gain.
    """
    count = len(sockets)
    gain = _gain(machine, count)
    size = format_bytes(machine.weights)
    if gain * gain < count:
        against = _against_copies(machine, sockets)
        if not against:
            why = (
                f"{count} sockets would read {size} of weights at {gain:.1f} times the rate of one"
            )
            return Layout(1, count), "replicas", f"{why} (est.), so each has an engine"
    else:
        against = f"at {gain:.1f} times the rate of one (est.)"
    return Layout(count), "tp", f"{count} sockets share {size} of weights, {against}"


def _against_copies(machine: _Machine, sockets: Sequence[Sequence[Core]]) -> str:
    """Return why each socket cannot have its own engine; "" if it can."""
    options, count = machine.options, len(sockets)
    cores = [len(cores) for cores in sockets]
    if machine.replicas is not None:
        return "in one engine"
    if options.kv_cache_space is not None or options.swap_space is not None:
        return "in one engine with the memory that was requested"
    if min(cores) < ALIKE_SOCKETS * max(cores):
        return f"because they have {min(cores)} to {max(cores)} cores"
    if not copy_fits(options, machine.facts, share_of(machine.host, count), machine.weights):
        return f"because {count} copies do not fit in memory"
    return ""


def _nodes_of(cores: Sequence[Core]) -> tuple[NodeId, ...]:
    return tuple(dict.fromkeys(core.node for core in cores))


def _room(host: Host, cores: Sequence[Core]) -> int:
    """Return the free memory of the socket of `cores`; it decides between equal sockets.

    With a CPU quota, servers in other containers choose between the same sockets.
    The memory that they use shows which sockets they have chosen.
    """
    if not quota_shares_cpus(host):
        return 0
    nodes = _nodes_of(cores)
    return sum(node.memory_available for node in host.nodes if node.id in nodes)


def _gain(machine: _Machine, ranks: int) -> float:
    """Return the estimated rate of `ranks` sockets for one request, relative to one socket."""
    alone = machine.weights / SOCKET_READ_BYTES_PER_S
    meetings = machine.facts.barriers * MEETING_S
    return alone / (alone / ranks + meetings)


def _groups(options: EngineOptions, host: Host) -> list[list[Core]]:
    """Return the compute cores of each NUMA node that may be used."""
    groups = by_node(worth_using(physical_cores(host)))
    if options.visible_memory_nodes is None:
        return groups
    wanted: Sequence[NodeId] = parse_nodes(options.visible_memory_nodes)
    # placement.py reports nodes that do not exist
    return [group for group in groups if group[0].node in wanted] or groups


def _check_ranks(
    options: EngineOptions, ledger: Ledger, layout: Layout, executor: str, why: str
) -> None:
    ranks = layout.ranks
    if ranks > 1 and executor != "native":
        msg = (
            f"{ledger.asked('tensor_parallel_size')}: the {executor} executor cannot split a "
            f"model; use 1"
        )
        raise ConfigError(msg)
    asked = isinstance(options.tensor_parallel_size, int)
    reason = "one group of threads over all cores"
    if layout.replicas > 1:
        reason += " of an engine"
    if ranks > 1:
        reason = "groups of threads, each with a part of the model in the memory of its node"
    if not asked and (options.numa or options.tensor_parallel_size == "auto"):
        reason = f"{reason}; {why}" if ranks > 1 else why
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
