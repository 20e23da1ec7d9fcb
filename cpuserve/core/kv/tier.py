"""The interface of an offload tier, which keeps the content of blocks outside the cache.

SwapSpace is the tier in memory; disk.py has the tier in files.

In the cache group of recurrent layers,
the content of a block is the states of these layers after the last token of the block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from cpuserve.core.kv.prefix import BlockHash, CachedBlock, PrefixChain

Data = bytes | bytearray | memoryview
# The content of a block, and the evicted entry that it belongs to, if the tier still has it.
TierBlock = tuple[Data, CachedBlock | None]


@dataclass(frozen=True, slots=True)
class TierNeeds:
    """The facts that a tier needs about the model and its settings.

    sizes: bytes of a block of each cache group.
    fingerprint: 32 bytes that differ if equal tokens could have other keys, values or states.
    head: 32 bytes that differ if a head that guesses tokens could have other keys and values;
      its blocks are the last group of `sizes`. b"" = there is no head.
    """

    sizes: tuple[int, ...]
    fingerprint: bytes
    head: bytes = b""


class Tier(Protocol):
    """Stores blocks; each block belongs to an entry of the prefix index and to a cache group.

    A block is found by its key, but the key alone is not trusted:
    the tokens of the block and all tokens before it must be equal.

    A failure of a tier never fails a request.

    name: the tier's name in metrics and in the cost model.
    durable: whether its blocks outlive the process; they are then saved before they are evicted.
    num_blocks, num_bytes: content of the tier, including blocks of other engines and models.
    """

    name: str
    durable: bool

    @property
    def seed(self) -> bytes | None:
        """The bytes that the hashes of block keys must start from; None = any bytes."""

    def __len__(self) -> int:
        """Return the number of blocks that this engine can use."""

    @property
    def num_blocks(self) -> int:
        """The number of blocks in the tier."""

    @property
    def num_bytes(self) -> int:
        """The size of all blocks in the tier, in bytes."""

    def find(self, chain: PrefixChain, index: int, group: int) -> bool:
        """Whether the tier has block `index` of `chain`, which follows the chain's entries.

        All earlier tokens need to be compared only for the first block after these entries.
        """

    def load(self, chain: PrefixChain, index: int, group: int) -> TierBlock | None:
        """Return the content of the first block after the chain's entries, which `find` has found.

        Returns None if the block is gone or damaged.
        """

    def ready(self, group: int) -> bool:
        """Whether `put` can store a block of a cache group without waiting."""

    def wants(self, entry: CachedBlock, group: int) -> bool:
        """Whether `put` should be called: the tier does not have the block and can keep it."""

    def put(self, entry: CachedBlock, group: int, data: Data, wait_s: float = 0.0) -> bool:
        """Store `data`, the content of the block of `entry`.

        wait_s: seconds to wait until the tier is ready. Returns False if it is not ready then.
        """

    def filled(self, entry: CachedBlock, group: int) -> None:
        """React to the fact that the KV cache has the block of `entry` again."""

    def close(self, wait_s: float) -> None:
        """Finish the writes within about `wait_s` seconds."""


class HeadTier:
    """A tier of a model, which stores the blocks of a head as one more cache group.

    The keys of the blocks of model and head start from the same seed.

    tier: the tier of the model, which also closes it. group: the group of `TierNeeds` of the head.
    """

    def __init__(self, tier: Tier, group: int) -> None:
        self.name, self.durable, self.seed = tier.name, tier.durable, tier.seed
        self._tier = tier
        self._group = group

    def __len__(self) -> int:
        return len(self._tier)

    @property
    def num_blocks(self) -> int:
        """The number of blocks in the tier."""
        return self._tier.num_blocks

    @property
    def num_bytes(self) -> int:
        """The size of all blocks in the tier, in bytes."""
        return self._tier.num_bytes

    def find(self, chain: PrefixChain, index: int, group: int) -> bool:
        """Whether the tier has block `index` of `chain`."""
        return self._tier.find(chain, index, self._group + group)

    def load(self, chain: PrefixChain, index: int, group: int) -> TierBlock | None:
        """Return the content of the block that `find` has found."""
        return self._tier.load(chain, index, self._group + group)

    def ready(self, group: int) -> bool:
        """Whether `put` can store a block without waiting."""
        return self._tier.ready(self._group + group)

    def wants(self, entry: CachedBlock, group: int) -> bool:
        """Whether `put` should be called."""
        return self._tier.wants(entry, self._group + group)

    def put(self, entry: CachedBlock, group: int, data: Data, wait_s: float = 0.0) -> bool:
        """Store `data`, the content of the block of `entry`."""
        return self._tier.put(entry, self._group + group, data, wait_s)

    def filled(self, entry: CachedBlock, group: int) -> None:
        """React to the fact that the cache of the head has the block of `entry` again."""
        self._tier.filled(entry, self._group + group)

    def close(self, wait_s: float) -> None:
        """Do nothing: the model closes the tier."""


class SwapSpace:
    """Holds at most `max_bytes` of evicted blocks; a new block replaces the oldest.

    sizes: bytes of a block of each cache group.

    A block that is restored to the KV cache is removed from this space. The hash alone is not
    trusted, as in PrefixIndex: the tokens of the block and all tokens before it are compared.
    """

    name = "swap"
    durable = False
    seed = None

    def __init__(self, max_bytes: int, sizes: Sequence[int]) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._sizes = sizes
        self._blocks: OrderedDict[tuple[BlockHash, int], tuple[CachedBlock, Data]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[tuple[CachedBlock, int, Data]]:
        return ((entry, group, data) for (_, group), (entry, data) in self._blocks.items())

    @property
    def num_blocks(self) -> int:
        """The number of blocks."""
        return len(self._blocks)

    def ready(self, group: int) -> bool:  # noqa: ARG002
        """Return True, because memory can store a block at any time."""
        return True

    def wants(self, entry: CachedBlock, group: int) -> bool:  # noqa: ARG002
        """Whether a block of `group` is not larger than the whole space."""
        return self._sizes[group] <= self._max_bytes

    def put(self, entry: CachedBlock, group: int, data: Data, wait_s: float = 0.0) -> bool:  # noqa: ARG002
        """Keep `data`, the content of the evicted block of `entry` in a cache group."""
        self._take(entry.key, group)
        while self.num_bytes + self._sizes[group] > self._max_bytes:
            self._take(*next(iter(self._blocks)))
        self._blocks[entry.key, group] = entry, data
        self.num_bytes += self._sizes[group]
        return True

    def _take(self, key: BlockHash, group: int) -> Data:
        """Remove a block and return its content; b"" if the block is not here."""
        _, data = self._blocks.pop((key, group), (None, None))
        if data is None:
            return b""
        self.num_bytes -= self._sizes[group]
        return data

    def find(self, chain: PrefixChain, index: int, group: int) -> bool:
        """Whether this space has block `index` of `chain`, which follows the chain's entries."""
        return self._entry(chain, index, group) is not None

    def load(self, chain: PrefixChain, index: int, group: int) -> TierBlock | None:
        """Remove the block that `find` has found, and return it with its entry."""
        entry = self._entry(chain, index, group)
        return None if entry is None else (self._take(entry.key, group), entry)

    def _entry(self, chain: PrefixChain, index: int, group: int) -> CachedBlock | None:
        """Return the entry of block `index` of `chain`, which follows the chain's entries.

        The first block after the chain's entries matches only if all tokens before it are equal.
        """
        parent = chain.last
        entry, _ = self._blocks.get((chain.keys[index], group), (None, b""))
        if entry is None or entry.content != chain.contents[index] or entry.salt != chain.salt:
            return None
        if index > chain.num_entries:  # the block before has no entry: the prefix is unknown
            return entry
        if not _same_prefix(entry.parent, parent):
            return None
        entry.parent = parent  # the next comparison of these prefixes then ends at once
        return entry

    def filled(self, entry: CachedBlock, group: int) -> None:
        """Remove the block of `entry` in `group`, because the KV cache has its content again."""
        self._take(entry.key, group)

    def close(self, wait_s: float) -> None:
        """Do nothing: the memory is freed when the process ends."""


def _same_prefix(a: CachedBlock | None, b: CachedBlock | None) -> bool:
    """Whether all tokens up to and including `a` and `b` are equal; None means no tokens."""
    while a is not b:
        if a is None or b is None or a.content != b.content:
            return False
        a, b = a.parent, b.parent
    return True
