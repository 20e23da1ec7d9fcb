"""Offload: keep the content of evicted KV blocks in memory or on disk, and restore it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Literal, Protocol

from cpuserve.core.kv.disk import DiskCache
from cpuserve.core.kv.prefix import CachedBlock, PrefixChain
from cpuserve.core.kv.swap import Data, SwapSpace
from cpuserve.ids import BlockId

Where = Literal["swap", "disk"]
PATIENCE_S = 0.01


class BlockBytes(Protocol):
    """The content of KV blocks of a cache group as bytes, between steps."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""

    def read(self, block: BlockId, group: int) -> Data:
        """Return a copy of the content of `block`."""

    def write(self, block: BlockId, group: int, data: Data) -> None:
        """Overwrite the content of `block`."""


@dataclass(slots=True)
class Offload:
    """The offload tiers behind the KV cache: memory (`swap`) and files (`disk`), both optional.

    seconds: total time spent on moving bytes. left_s: time that may still be spent before the
    engine takes its messages again. num_saved, hits: blocks saved and restored so far.
    """

    blocks: BlockBytes
    swap: SwapSpace | None = None
    disk: DiskCache | None = None
    seconds: float = 0.0
    left_s: float = math.inf
    num_saved: int = 0
    hits: dict[Where, int] = field(default_factory=lambda: {"swap": 0, "disk": 0})
    _unsaved: dict[tuple[CachedBlock, int], None] = field(default_factory=dict)

    @property
    def has_time(self) -> bool:
        """Whether more blocks may be moved before the engine takes its messages again."""
        return self.left_s > 0.0

    @property
    def num_restored(self) -> int:
        """Number of blocks restored so far."""
        return sum(self.hits.values())

    @property
    def swap_blocks(self) -> int:
        """Number of blocks in swap memory."""
        return 0 if self.swap is None else len(self.swap)

    @property
    def swap_bytes(self) -> int:
        """Bytes of the blocks in swap memory."""
        return self.swap_blocks * self.blocks.block_bytes if self.swap is not None else 0

    @property
    def disk_files(self) -> int:
        """Number of blocks on disk, including those of other models."""
        return 0 if self.disk is None else self.disk.num_files

    @property
    def disk_bytes(self) -> int:
        """Bytes of all files."""
        return 0 if self.disk is None else self.disk.num_bytes

    def added(self, entry: CachedBlock, group: int) -> None:
        """Note that the block of `entry` in `group` has been published in the cache."""
        if self.disk is not None and self.disk.wants(entry, group):
            self._unsaved[entry, group] = None

    def filled(self, entry: CachedBlock, group: int) -> None:
        """Note that `entry`, which had no block in `group`, has one again."""
        if self.swap is not None:
            self.swap.discard(entry, group)
        self.added(entry, group)

    def removed(self, entry: CachedBlock) -> None:
        """Note that the content of `entry` is not valid."""
        for group in range(len(entry.blocks)):
            self._unsaved.pop((entry, group), None)

    def evicted(self, entry: CachedBlock, group: int) -> None:
        """Save the block of `entry` in `group`, which is about to be reused.

        Its content is lost if there is no time left to save it.
        """
        self._unsaved.pop((entry, group), None)
        disk = self.disk
        to_disk = disk is not None and disk.can_queue and disk.wants(entry, group)
        if not self.has_time or (self.swap is None and not to_disk):
            return
        began = time.perf_counter()
        data = self.blocks.read(entry.blocks[group], group)
        if self.swap is not None:
            self.swap.put(entry, group, data)
        if to_disk and disk is not None:
            disk.put(entry, data, group=group)
        self.num_saved += 1
        self._spent(began)

    def tidy(self) -> bool:
        """Write one block to disk while the engine is idle; False if all are on disk."""
        disk = self.disk
        if disk is None or not self._unsaved:
            return False
        unsaved = next(iter(self._unsaved))
        entry, group = unsaved
        data = self.blocks.read(entry.blocks[group], group) if disk.wants(entry, group) else None
        if data is None or disk.put(entry, data, PATIENCE_S, group):
            del self._unsaved[unsaved]
        return bool(self._unsaved)

    def find(self, chain: PrefixChain, index: int, group: int) -> Where | None:
        """Return the tier that holds block `index` of `chain`, the next after its entries."""
        if self.swap is not None and self.swap.find(chain, index, chain.last, group) is not None:
            return "swap"
        if self.disk is not None and self.disk.has(chain.keys[index], group):
            return "disk"
        return None

    def restore(
        self, chain: PrefixChain, group: int, block: BlockId
    ) -> tuple[bool, CachedBlock | None]:
        """Fill `block` with the next block of `chain`; return (whether it was found, its entry)."""
        index, began = chain.num_entries, time.perf_counter()
        entry: CachedBlock | None = None
        data: Data | None = None
        where: Where = "swap"
        if self.swap is not None:
            entry = self.swap.find(chain, index, chain.last, group)
            data = None if entry is None else self.swap.take(entry, group)
        if data is None and self.disk is not None:
            where, data = "disk", self.disk.load(chain, index, group)
        if data is not None:
            self.blocks.write(block, group, data)
            self.hits[where] += 1
        self._spent(began)
        return data is not None, entry

    def _spent(self, began: float) -> None:
        took = time.perf_counter() - began
        self.seconds += took
        self.left_s -= took

    def clear(self) -> None:
        """Forget everything."""
        self._unsaved.clear()
        if self.swap is not None:
            self.swap.clear()
        if self.disk is not None:
            self.disk.clear()

    def report(self) -> dict[str, object]:
        """Sizes and counters."""
        return {
            "swap_blocks": self.swap_blocks,
            "disk_blocks": len(self.disk) if self.disk is not None else 0,
            "disk_bytes": self.disk_bytes,
            "blocks_saved": self.num_saved,
            "blocks_restored": self.num_restored,
        }

    def close(self, wait_s: float = 3.0) -> None:
        """Write blocks that are not on disk yet, for at most `wait_s` seconds."""
        if self.disk is None:
            return
        end = time.monotonic() + wait_s
        while self.tidy() and time.monotonic() < end:
            pass
        self.disk.close(max(0.1, end - time.monotonic()))
