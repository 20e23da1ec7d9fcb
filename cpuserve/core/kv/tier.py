"""The interface of an offload tier, which keeps the content of blocks outside the cache.

In the cache group of recurrent layers,
the content of a block is the states of these layers after the last token of the block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cpuserve.core.kv.prefix import CachedBlock, PrefixChain

Data = bytes | bytearray | memoryview
# The content of a block, and the evicted entry that it belongs to, if the tier still has it.
TierBlock = tuple[Data, CachedBlock | None]


@dataclass(frozen=True, slots=True)
class TierNeeds:
    """The facts that a tier needs about the model and its settings.

    sizes: bytes of a block of each cache group.
    fingerprint: 32 bytes that differ if equal tokens could have other keys, values or states.
    """

    sizes: tuple[int, ...]
    fingerprint: bytes


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
