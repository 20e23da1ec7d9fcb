"""KvManager: gives sequences the blocks their tokens need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cpuserve.core.kv.pool import BlockPool
from cpuserve.core.kv.prefix import PrefixMatch
from cpuserve.ids import BlockId


class KvManager:
    """Block tables grow and are freed through here; the tables themselves live in the requests."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)

    @property
    def num_blocks(self) -> int:
        """All blocks of the cache."""
        return self.pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be given out now."""
        return self.pool.num_free

    @property
    def usage(self) -> float:
        """Fraction of the blocks in use, 0 to 1."""
        return 1.0 - self.pool.num_free / self.pool.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def match_prefix(self, token_ids: Sequence[int]) -> PrefixMatch:  # noqa: ARG002
        """Blocks that already hold a prefix of `token_ids`: none, until blocks are published."""
        return PrefixMatch()

    def grow(self, table: list[BlockId], num_tokens: int, *, spare: int = 0) -> bool:
        """Extend `table` so that it holds `num_tokens` tokens.

        False, and nothing changed, if that would leave fewer than `spare` free blocks.
        """
        missing = self.blocks_for(num_tokens) - len(table)
        if missing <= 0:
            return True
        if missing + spare > self.pool.num_free:
            return False
        table.extend(self.pool.take(missing))
        return True

    def adopt(self, table: list[BlockId], match: PrefixMatch) -> None:
        """Start the empty `table` with the shared blocks of `match`."""
        assert not table, "only a new sequence adopts a prefix"
        self.pool.share(match.blocks)
        table.extend(match.blocks)

    def free(self, table: list[BlockId]) -> None:
        """Give the blocks of `table` back, last one first, and empty it."""
        self.pool.release(reversed(table))
        table.clear()

    def check_invariants(self, tables: Iterable[Sequence[BlockId]]) -> None:
        """AssertionError unless `tables` are all there is: free + used = all, counts exact."""
        uses = [block for table in tables for block in table]
        self.pool.check_invariants(uses)
        assert self.pool.num_free + len(set(uses)) == self.pool.num_blocks, "a block is lost"
