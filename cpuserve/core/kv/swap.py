"""SwapSpace: copies of KV blocks that were evicted from the cache, in other memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from cpuserve.core.kv.prefix import BlockHash, CachedBlock, PrefixChain

Data = bytes | bytearray | memoryview


class SwapSpace:
    """Holds at most `num_blocks` evicted blocks; when it is full, a new one replaces the oldest.

    An entry that is restored to the cache is removed here. As in PrefixIndex, the hash alone is not
    trusted: the tokens of the block and all tokens before it are compared.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._blocks: OrderedDict[tuple[BlockHash, int], tuple[CachedBlock, Data]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[tuple[CachedBlock, int, Data]]:
        return ((entry, group, data) for (_, group), (entry, data) in self._blocks.items())

    def put(self, entry: CachedBlock, group: int, data: Data) -> None:
        """Keep `data`, the content of the evicted block of `entry` in a cache group."""
        self._blocks.pop((entry.key, group), None)
        if not self.num_blocks:
            return
        while len(self._blocks) >= self.num_blocks:
            self._blocks.popitem(last=False)
        self._blocks[entry.key, group] = entry, data

    def find(
        self, chain: PrefixChain, index: int, parent: CachedBlock | None, group: int
    ) -> CachedBlock | None:
        """Return the entry of block `index` of `chain` whose parent equals `parent`, or None."""
        entry, _ = self._blocks.get((chain.keys[index], group), (None, b""))
        if entry is None or entry.content != chain.contents[index] or entry.salt != chain.salt:
            return None
        if not _same_prefix(entry.parent, parent):
            return None
        entry.parent = parent  # so that the next comparison ends at once
        return entry

    def take(self, entry: CachedBlock, group: int) -> Data:
        """Remove the block of `entry` in `group` and return its data."""
        return self._blocks.pop((entry.key, group))[1]

    def discard(self, entry: CachedBlock, group: int) -> None:
        """Remove the block of `entry` in `group`, if there is one."""
        self._blocks.pop((entry.key, group), None)

    def clear(self) -> None:
        """Remove all entries."""
        self._blocks.clear()


def _same_prefix(a: CachedBlock | None, b: CachedBlock | None) -> bool:
    """Whether all tokens up to and including `a` and `b` are equal; None stands for no tokens."""
    while a is not b:
        if a is None or b is None or a.content != b.content:
            return False
        a, b = a.parent, b.parent
    return True
