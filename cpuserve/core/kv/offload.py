"""Offload: keep the content of evicted blocks in tiers below the cache, and restore it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cpuserve.base.ids import BlockId
from cpuserve.core.kv.prefix import CachedBlock, PrefixChain
from cpuserve.core.kv.tier import Data, Tier

PATIENCE_S = 0.01


class BlockBytes(Protocol):
    """Reads and writes the content of blocks as bytes, between steps."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The bytes of one block, for each cache group."""

    def read(self, block: BlockId, group: int) -> Data:
        """Return a copy of the content of `block`."""

    def write(self, block: BlockId, group: int, data: Data) -> None:
        """Overwrite the content of `block`."""


@dataclass(slots=True)
class Offload:
    """The offload tiers below the KV cache, the fastest one first.

    seconds: total time spent on moving bytes.
    left_s: seconds that may still be spent before the engine takes its messages again.
    num_saved: number of blocks saved.
    hits: number of blocks restored, by the name of the tier.
    """

    blocks: BlockBytes
    tiers: Sequence[Tier]
    seconds: float = 0.0
    left_s: float = math.inf
    num_saved: int = 0
    hits: dict[str, int] = field(init=False)
    _durable: list[Tier] = field(init=False)
    _unsaved: dict[tuple[CachedBlock, int], None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.hits = dict.fromkeys((tier.name for tier in self.tiers), 0)
        self._durable = [tier for tier in self.tiers if tier.durable]

    @property
    def has_time(self) -> bool:
        """Whether more blocks may be moved before the engine takes its messages again."""
        return self.left_s > 0.0

    @property
    def num_restored(self) -> int:
        """Number of blocks restored so far."""
        return sum(self.hits.values())

    @property
    def seed(self) -> bytes | None:
        """The bytes that the hashes of block keys must start from; None = any bytes."""
        return next((tier.seed for tier in self.tiers if tier.seed is not None), None)

    def added(self, entry: CachedBlock, group: int) -> None:
        """Note that the block of `entry` in `group` has been published in the cache."""
        if any(tier.wants(entry, group) for tier in self._durable):
            self._unsaved[entry, group] = None

    def filled(self, entry: CachedBlock, group: int) -> None:
        """Note that `entry`, which had no block in `group`, has one again."""
        for tier in self.tiers:
            tier.filled(entry, group)
        self.added(entry, group)

    def removed(self, entry: CachedBlock) -> None:
        """Note that the content of the blocks of `entry` is not valid, so they are not saved."""
        for group in range(len(entry.blocks)):
            self._unsaved.pop((entry, group), None)

    def evicted(self, entry: CachedBlock, group: int) -> None:
        """Save the block of `entry` in `group`, which is about to be reused.

        The content of the block is lost if there is no time left to save it.
        """
        self._unsaved.pop((entry, group), None)
        takers = [tier for tier in self.tiers if tier.ready(group) and tier.wants(entry, group)]
        if not self.has_time or not takers:
            return
        began = time.perf_counter()
        data = self.blocks.read(entry.blocks[group], group)
        for tier in takers:
            tier.put(entry, group, data)
        self.num_saved += 1
        self._spent(began)

    def tidy(self) -> bool:
        """Save one block to the durable tiers while the engine is idle; False if all are saved."""
        if not self._unsaved:
            return False
        unsaved = next(iter(self._unsaved))
        entry, group = unsaved
        takers = [tier for tier in self._durable if tier.wants(entry, group)]
        data = self.blocks.read(entry.blocks[group], group) if takers else b""
        if all(tier.put(entry, group, data, PATIENCE_S) for tier in takers):
            del self._unsaved[unsaved]
        return bool(self._unsaved)

    def find(self, chain: PrefixChain, index: int, group: int) -> int | None:
        """Return the index in `tiers` of the first tier that has block `index` of `chain`, or None.

        Block `index` comes after the last block of `chain` that has an entry in the prefix index.
        """
        found = (i for i, tier in enumerate(self.tiers) if tier.find(chain, index, group))
        return next(found, None)

    def restore(
        self, chain: PrefixChain, group: int, block: BlockId
    ) -> tuple[bool, CachedBlock | None]:
        """Fill `block` with the content of the next block of `chain`.

        Returns (whether a tier had the block,
        the evicted entry of the block if the tier has kept it).
        """
        began = time.perf_counter()
        loaded = None
        for tier in self.tiers:
            index = chain.num_entries
            loaded = tier.load(chain, index, group) if tier.find(chain, index, group) else None
            if loaded is not None:
                self.blocks.write(block, group, loaded[0])
                self.hits[tier.name] += 1
                break
        self._spent(began)
        return (False, None) if loaded is None else (True, loaded[1])

    def _spent(self, began: float) -> None:
        took = time.perf_counter() - began
        self.seconds += took
        self.left_s -= took

    def report(self) -> dict[str, object]:
        """Return the sizes of the tiers, and counters of saved and restored blocks."""
        sizes: dict[str, object] = {}
        for tier in self.tiers:
            sizes |= {f"{tier.name}_blocks": len(tier), f"{tier.name}_bytes": tier.num_bytes}
        return {**sizes, "blocks_saved": self.num_saved, "blocks_restored": self.num_restored}

    def close(self, wait_s: float = 3.0) -> None:
        """Save blocks that the durable tiers do not have yet, for at most `wait_s` seconds."""
        end = time.monotonic() + wait_s
        while self.tidy() and time.monotonic() < end:
            pass
        for tier in self.tiers:
            tier.close(max(0.1, end - time.monotonic()))
