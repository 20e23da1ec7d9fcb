"""SwapSpace: KV blocks that had to leave the cache, byte for byte in other memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from cpuserve.core.kv.prefix import BlockHash, CachedBlock, PrefixChain

Data = bytes | bytearray | memoryview


class SwapSpace:
    """At most `num_blocks` evicted blocks; a new one takes the place of the oldest.

    An entry that comes back leaves: its bytes are in the cache again. As there, the hash only finds
    it; tokens and all tokens before them are compared.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._blocks: OrderedDict[BlockHash, tuple[CachedBlock, Data]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[tuple[CachedBlock, Data]]:
        return iter(self._blocks.values())

    def put(self, entry: CachedBlock, data: Data) -> None:
        """Keep what the block of `entry` held."""
        self._blocks.pop(entry.key, None)
        if not self.num_blocks:
            return
        while len(self._blocks) >= self.num_blocks:
            self._blocks.popitem(last=False)
        self._blocks[entry.key] = entry, data

    def find(
        self, chain: PrefixChain, index: int, parent: CachedBlock | None
    ) -> CachedBlock | None:
        """The entry of block `index` of `chain` after `parent`, if it is here."""
        entry, _ = self._blocks.get(chain.keys[index], (None, b""))
        if entry is None or entry.content != chain.contents[index] or entry.salt != chain.salt:
            return None
        if not _same_prefix(entry.parent, parent):
            return None
        entry.parent = parent  # so that the next comparison is short
        return entry

    def take(self, entry: CachedBlock) -> Data:
        """Remove what `put` was given with `entry`."""
        return self._blocks.pop(entry.key)[1]

    def clear(self) -> None:
        """Forget everything."""
        self._blocks.clear()


def _same_prefix(a: CachedBlock | None, b: CachedBlock | None) -> bool:
    """The tokens up to the ends of `a` and `b` are equal; None is the beginning."""
    while a is not b:
        if a is None or b is None or a.content != b.content:
            return False
        a, b = a.parent, b.parent
    return True
