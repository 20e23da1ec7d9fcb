"""Data parallelism: what one of several engines on a machine gets of it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from cpuserve.config.engine import EngineConfig
from cpuserve.platforms.host import Host
from cpuserve.platforms.placement import Placement, Rank


def share_of(host: Host, replicas: int) -> Host:
    """`host` with the memory one of `replicas` equal engines may take.

    The limits of a process stay: each engine is one.
    """
    if replicas == 1:
        return host
    group = host.cgroup
    free = group.memory_available
    nodes = tuple(
        msgspec.structs.replace(node, memory_available=node.memory_available // replicas)
        for node in host.nodes
    )
    return msgspec.structs.replace(
        host,
        nodes=nodes,
        memory_available=host.memory_available // replicas,
        cgroup=msgspec.structs.replace(
            group, memory_available=None if free is None else free // replicas
        ),
    )


def replica_configs(
    config: EngineConfig, placement: Placement, replicas: int
) -> tuple[EngineConfig, ...]:
    """`config` for each engine: its own threads, CPUs, seed, and directory of the prefix cache."""
    size = len(placement.ranks) // replicas
    made = []
    for index in range(replicas):
        ranks = placement.ranks[index * size : (index + 1) * size]
        made.append(_placed(config, ranks, index, replicas))
    return tuple(made)


def _placed(
    config: EngineConfig, ranks: tuple[Rank, ...], index: int, replicas: int
) -> EngineConfig:
    own = Placement(ranks)
    cpus = own.cpus
    directory = config.prefix_cache_dir
    if replicas > 1 and directory is not None:  # engines do not share files
        directory = str(Path(directory) / f"replica-{index}")
    return msgspec.structs.replace(
        config,
        threads=own.threads,
        rank_threads=[rank.threads for rank in ranks],
        cpus=None if cpus is None else list(cpus),
        seed=config.seed + index,  # the same question twice need not get the same answer
        prefix_cache_dir=directory,
        prefix_cache_bytes=config.prefix_cache_bytes // replicas,
    )
