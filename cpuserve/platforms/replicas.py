"""Data parallelism: the part of the machine that each engine gets."""

from __future__ import annotations

from pathlib import Path

import msgspec

from cpuserve.config.engine import EngineConfig
from cpuserve.platforms.host import Host
from cpuserve.platforms.placement import Placement, Rank, rank_cpus


def share_of(host: Host, replicas: int) -> Host:
    """Return `host` with the memory that one of `replicas` equal engines may use.

    The limits of a process (ulimit) are not divided, because each engine is its own process.
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
    """Return the config of each engine, with its own threads, CPUs, seed and prefix cache."""
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
    complexes = dict(zip(config.cpus or (), config.core_complexes, strict=True))
    speeds = dict(zip(config.cpus or (), config.thread_speeds, strict=False))
    directory, events = config.prefix_cache_dir, config.kv_events
    if events is not None:
        events = msgspec.structs.replace(events, rank=index)
    # Each engine has a folder of its own for cached prefixes.
    if replicas > 1 and directory is not None:
        directory = str(Path(directory) / f"replica-{index}")
    return msgspec.structs.replace(
        config,
        threads=own.threads,
        rank_threads=[rank.threads for rank in ranks],
        core_complexes=[complexes[cpu] for cpu in cpus or ()],
        thread_speeds=[speeds[cpu] for cpu in cpus or () if speeds],
        cpus=None if cpus is None else list(cpus),
        rank_cpus=rank_cpus(ranks),
        seed=config.seed + index,  # engines sample differently for equal requests
        prefix_cache_dir=directory,
        prefix_cache_bytes=config.prefix_cache_bytes // replicas,
        kv_events=events,
    )
