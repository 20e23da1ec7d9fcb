"""Data parallelism: the part of the machine that each engine gets."""

from __future__ import annotations

import msgspec

from cpuserve.base.errors import ConfigError
from cpuserve.config.decisions import Ledger
from cpuserve.config.engine import PREFIX_CACHE_QUEUE_BYTES, EngineConfig
from cpuserve.config.options import EngineOptions
from cpuserve.config.values import format_bytes, format_gib, parse_space
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
    """Return the config of each engine, with its own threads, CPUs and seed."""
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
    events = config.kv_events
    if events is not None:
        events = msgspec.structs.replace(events, rank=index)
    return msgspec.structs.replace(
        config,
        threads=own.threads,
        rank_threads=[rank.threads for rank in ranks],
        core_complexes=[complexes[cpu] for cpu in cpus or ()],
        thread_speeds=[speeds[cpu] for cpu in cpus or () if speeds],
        cpus=None if cpus is None else list(cpus),
        rank_cpus=rank_cpus(ranks),
        seed=config.seed + index,  # engines sample differently for equal requests
        shares_prefixes=replicas > 1,
        shared_prefix_bytes=config.shared_prefix_bytes * replicas,
        kv_events=events,
    )


def shared_prefixes(
    options: EngineOptions, ledger: Ledger, left: int, used: int, engines: int
) -> int:
    """Return the part of each of several engines in the blocks that they share in memory.

    left: the bytes of memory that each engine has left.
    used: the bytes of the KV cache and of the swap space of each engine.

    Raises:
        ConfigError: the requested memory does not fit.
    """
    if engines == 1 or (options.prefix_cache_dir and options.shared_prefix_space is None):
        return 0
    size, why = min(used, left // 2), "for prefixes that the engines read from each other"
    if options.shared_prefix_space is not None:
        size, why = (parse_space(options.shared_prefix_space).bytes or 0) // engines, "as requested"
    if size > left:
        msg = (
            f"{ledger.asked('shared_prefix_space')}: {format_bytes(size * engines)} do not fit "
            f"beside the KV caches of {engines} engines; give at most {format_gib(left * engines)}"
        )
        raise ConfigError(msg)
    ledger.decide("shared_prefix_space", format_bytes(size * engines), why)
    return size


def written_bytes(options: EngineOptions, block: int, engines: int) -> int:
    """Return the bytes of blocks that wait for files, are copied for them, or are written."""
    written = options.prefix_cache_dir is not None or engines > 1
    if options.enable_prefix_caching is False or not written:
        return 0
    return max(PREFIX_CACHE_QUEUE_BYTES, block) + 2 * block
