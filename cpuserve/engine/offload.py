"""Set up the KV cache of one engine and its offload tiers: memory, files, and those in TIERS."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cpuserve.base.errors import ConfigError
from cpuserve.base.ids import BlockId
from cpuserve.base.log import get_logger
from cpuserve.base.registry import Registry
from cpuserve.config.cache_groups import cache_use
from cpuserve.config.engine import PREFIX_CACHE_QUEUE_BYTES
from cpuserve.core.kv.cache_folder import claim
from cpuserve.core.kv.disk import DiskCache
from cpuserve.core.kv.manager import KvManager
from cpuserve.core.kv.offload import Offload
from cpuserve.core.kv.tier import Data, HeadTier, SwapSpace, Tier, TierNeeds
from cpuserve.core.speculation.proposer import Proposer
from cpuserve.engine.fingerprint import fingerprint, head_fingerprint

if TYPE_CHECKING:
    from cpuserve.config.engine import EngineConfig
    from cpuserve.engine.kv_events import KvEventPublisher
    from cpuserve.runtime.executor import Executor

# Functions that create further tiers. The str is the location of the tier,
# from the option kv_tiers. If a function raises OSError, the engine runs without its tier.
MakeTier = Callable[[str, TierNeeds], Tier]
TIERS: Registry[MakeTier] = Registry(
    "KV tier",
    {
        "shared": "cpuserve.core.kv.shared:make_shared",
    },
)

log = get_logger("engine")


class ExecutorBlocks:
    """BlockBytes of an executor: reads and writes the content of its blocks.

    The states of recurrent layers, if there are any, are one more group after the KV groups.
    """

    def __init__(self, executor: Executor, num_groups: int) -> None:
        self._executor = executor
        self._num_groups = num_groups

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of a block of each group."""
        states = self._executor.snapshot_bytes
        return (self._executor.kv_block_bytes,) * self._num_groups + (states,) * bool(states)

    def _slot(self, block: BlockId) -> int:
        """Return the state slot of `block`; the ids of slots follow the ids of KV blocks."""
        return block - self._executor.num_blocks

    def read(self, block: BlockId, group: int) -> Data:
        """Return a copy of the content of `block`."""
        if group == self._num_groups:
            return self._executor.read_snapshot(self._slot(block)).data
        return self._executor.read_blocks(np.array([block], np.int32), group).reshape(-1).data

    def write(self, block: BlockId, group: int, data: Data) -> None:
        """Overwrite the content of `block`."""
        if group == self._num_groups:
            self._executor.write_snapshot(self._slot(block), np.frombuffer(data, np.uint8))
            return
        rows = np.frombuffer(data, np.uint8).reshape(1, -1)
        self._executor.write_blocks(np.array([block], np.int32), rows, group)


def check_tiers(config: EngineConfig) -> None:
    """Raise ConfigError if a tier is unknown, or the cache directory has files of other programs.

    This check runs before the weights are read. Later failures of a tier are only warnings.
    """
    for name in config.kv_tiers:
        if name not in TIERS:
            msg = f"kv_tiers: there is no tier {name[:80]!r}; there are: {', '.join(TIERS)}"
            raise ConfigError(msg)
    if config.enable_prefix_caching and config.prefix_cache_dir is not None:
        with suppress(OSError):
            claim(Path(config.prefix_cache_dir).expanduser())


def make_kv(
    config: EngineConfig,
    executor: Executor,
    kv_events: KvEventPublisher | None = None,
    proposer: Proposer | None = None,
) -> KvManager:
    """Return the KV cache of an engine; its tiers also keep the keys of a head.

    Raises:
        ConfigError: a tier is unknown, or the cache directory has files of other programs.
    """
    windows = [group.window for group in config.kv_groups] or [0]
    return KvManager(
        # One block is reserved: entries of block tables refer to it
        # if a sliding window has passed their block, or if their block has no state.
        config.kv_blocks - (any(windows) or config.state_slots > 0),
        config.block_size,
        use=cache_use(windows, config.max_num_batched_tokens, config.block_size, config.media_span),
        prefix_caching=config.enable_prefix_caching,
        offload=make_offload(config, executor, proposer),
        num_states=config.state_slots,
        events=None if kv_events is None else kv_events.changes,
    )


def make_offload(
    config: EngineConfig, executor: Executor, proposer: Proposer | None = None
) -> Offload | None:
    """Return the offload tiers of `config`, or None; a tier that fails is omitted with a warning.

    Raises:
        ConfigError: a tier is unknown, or the cache directory has files of other programs.
        ModelError: a file of the model cannot be read.
    """
    if not config.enable_prefix_caching:
        return None
    blocks = ExecutorBlocks(executor, max(1, len(config.kv_groups)))
    draft_keys = None if proposer is None else proposer.kept_keys
    head = 0 if draft_keys is None else sum(draft_keys.sizes)
    sizes = (*blocks.sizes, head) if head else blocks.sizes
    directories = {"host": config.shared_prefix_dir, "disk": config.prefix_cache_dir}
    files = any(directories.values()) or config.kv_tiers
    mark = fingerprint(config, blocks.sizes) if files else b""
    needs = TierNeeds(sizes, mark, head_fingerprint(config, head) if head and files else b"")
    tiers: list[Tier] = []
    if config.swap_bytes >= min(blocks.sizes):
        tiers.append(SwapSpace(config.swap_bytes, sizes))
    most = {"host": config.shared_prefix_bytes, "disk": config.prefix_cache_bytes}
    for name, directory in directories.items():
        if directory is None:
            continue
        try:
            tiers.append(
                DiskCache(
                    Path(directory).expanduser(),
                    needs,
                    most[name],
                    PREFIX_CACHE_QUEUE_BYTES,
                    config.frontend_cpus or config.compute_cpus or (),
                    name=name,
                    finds_new=config.shares_prefixes,
                )
            )
        except OSError as error:
            log.warning("%s cannot be used, so no KV blocks are kept there: %s", directory, error)
    for name in (name for name in TIERS if name in config.kv_tiers):
        make = TIERS.get(name)
        assert make is not None
        try:
            tiers.append(make(config.kv_tiers[name], needs))
        except OSError as error:
            log.warning("the KV tier %s cannot be used, so nothing is found there: %s", name, error)
    if not tiers:
        return None
    if proposer is not None and draft_keys is not None and head:
        own = [HeadTier(tier, len(blocks.sizes)) for tier in tiers]
        proposer.keep(Offload(draft_keys, own))
    return Offload(blocks, tiers)
