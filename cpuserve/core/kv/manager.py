"""KvManager: allocate KV blocks for sequences, and share blocks with equal prefixes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cpuserve.core.kv.offload import Offload, Where
from cpuserve.core.kv.pool import BlockPool
from cpuserve.core.kv.prefix import (
    FORGOTTEN,
    CachedBlock,
    ChainMark,
    Digest,
    PrefixChain,
    PrefixIndex,
    PrefixMatch,
    sha256,
)
from cpuserve.ids import BlockId


class KvManager:
    """Allocates, shares and frees the blocks of block tables, which the requests own.

    With `prefix_caching`, full blocks are published under a hash of their tokens, and stay cached
    after their last use until their memory is needed. `offload` may keep them for longer.

    window: most keys that a token sees in any layer, itself included (0 = all of them). Blocks left
    of it are freed while their sequence runs. Their entries in the table then name block
    `num_blocks`, which is not in the pool and is never written.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = True,
        digest: Digest = sha256,
        offload: Offload | None = None,
        window: int = 0,
    ) -> None:
        self.block_size = block_size
        self.window = window
        self.gone = BlockId(num_blocks)
        self.prefix_caching = prefix_caching
        self.offload = offload
        disk = offload.disk if offload is not None else None
        self.index = PrefixIndex(block_size, digest, disk.seed if disk is not None else None)
        self.pool = BlockPool(num_blocks, self._evicted, self._continuations)

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the cache."""
        return self.pool.num_blocks

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated now, including cached ones."""
        return self.pool.num_free

    @property
    def num_cached(self) -> int:
        """Number of unused blocks whose prefix can still be found."""
        return self.pool.num_cached

    @property
    def usage(self) -> float:
        """Fraction of the blocks in use, 0 to 1."""
        return 1.0 - self.pool.num_free / self.pool.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    # --- prefixes -----------------------------------------------------------------------------

    def match_prefix(self, chain: PrefixChain, token_ids: Sequence[int]) -> PrefixMatch:
        """Return the cached blocks of the longest prefix of `token_ids`, without the last token.

        The last token has to run in any case, since its logits are needed.
        """
        if not self.prefix_caching:
            return PrefixMatch()
        most = (len(token_ids) - 1) // self.block_size
        self.index.name(chain, token_ids, most)
        entries = self.index.walk(chain, most)
        return PrefixMatch(entries, len(entries) * self.block_size)

    def adopt(self, table: list[BlockId], chain: PrefixChain, match: PrefixMatch) -> None:
        """Start the empty `table` with the shared blocks of `match`."""
        assert not table, "only a new sequence can adopt a prefix"
        self.pool.share(match.blocks)
        table.extend(match.blocks)
        for entry in match.entries:
            chain.advance(entry)

    def catch_up(
        self, table: list[BlockId], chain: PrefixChain, token_ids: Sequence[int], computed: int
    ) -> int:
        """Replace blocks after `computed` tokens by blocks that others have published meanwhile.

        Returns how many tokens need not run any more (the last one always has to).
        """
        size = self.block_size
        index = chain.num_entries
        if not self.prefix_caching or computed != index * size:
            return 0
        most = (len(token_ids) - 1) // size
        self.index.name(chain, token_ids, most)
        while index < most and (entry := self.index.find(chain, index, chain.last)) is not None:
            self._replace(table, index, entry.block)
            chain.advance(entry)
            index += 1
        return index * size - computed

    def publish(
        self,
        table: list[BlockId],
        chain: PrefixChain,
        token_ids: Sequence[int],
        num_tokens: int,
        *,
        computed: bool,
    ) -> None:
        """Publish the full blocks among the first `num_tokens` tokens, so that others find them.

        computed: the tokens have run. Then a block is replaced by a published one with equal
        content. Before that it is kept, because its tokens still have to be written to it.
        """
        if not self.prefix_caching:
            return
        full = num_tokens // self.block_size
        if chain.num_entries >= full:
            return
        self.index.name(chain, token_ids, full)
        for index in range(chain.num_entries, full):
            block = table[index]
            if block == self.gone:
                return
            entry = self.index.insert(chain, block)
            if entry is None:
                return
            if entry.block == block:
                self.pool.keep(block)
                chain.own.append(entry)
                if self.offload is not None:
                    self.offload.added(entry)
            elif not computed:
                return
            else:
                self._replace(table, index, entry.block)
            chain.advance(entry)

    def unpublish(self, table: Iterable[BlockId]) -> None:
        """Remove these blocks from the index, because their step failed."""
        for block in table:
            entry = self.index.entry(block)
            if entry is not None:
                self._forget(entry)

    def unpublish_own(self, chain: PrefixChain) -> None:
        """Remove the blocks that this sequence has published from the index, no others."""
        self._forget_all(chain.own)
        chain.own.clear()

    def unpublish_since(self, chain: PrefixChain, mark: ChainMark) -> None:
        """Return the chain to `mark`, and remove the blocks published since then from the index."""
        self._forget_all(chain.return_to(mark))

    def _forget_all(self, entries: Iterable[CachedBlock]) -> None:
        for entry in entries:
            if entry.block != FORGOTTEN:
                self._forget(entry)

    def _forget(self, entry: CachedBlock) -> None:
        """Remove `entry` and all that continue it, whose keys were computed from its content."""
        for each in (*reversed(self.index.continuations(entry)), entry):
            if self.offload is not None:
                self.offload.removed(each)
            block = each.block
            self.index.forget(each)
            self.pool.drop(block)

    def clear_prefixes(self) -> None:
        """Forget every prefix, also in offload tiers; running sequences keep their blocks."""
        self.unpublish([BlockId(block) for block in range(self.num_blocks)])
        if self.offload is not None:
            self.offload.clear()

    def _evicted(self, block: BlockId) -> None:
        entry = self.index.entry(block)
        assert entry is not None, "a cached block has no name"
        for child in list(
            entry.children
        ):  # used by a sequence whose sliding window has passed `block`
            self._forget(child)
        if self.offload is not None:
            self.offload.evicted(entry)
        self.index.forget(entry)

    def _continuations(self, block: BlockId) -> list[BlockId]:
        """Return the blocks that continue the prefix of `block`, each after its parent.

        Usually a block is freed before its parent, with its sequence; but it is freed after its
        parent if a sliding window has moved.
        """
        entry = self.index.entry(block)
        assert entry is not None, "a cached block has no name"
        return [child.block for child in self.index.continuations(entry)]

    # --- offload ------------------------------------------------------------------------------

    def restorable(
        self, table: list[BlockId], chain: PrefixChain, token_ids: Sequence[int], computed: int
    ) -> Where | None:
        """Return the tier that holds the block after `computed` tokens (never the last token's)."""
        size, index = self.block_size, chain.num_entries
        if self.offload is None or not self.prefix_caching or computed != index * size:
            return None
        most = (len(token_ids) - 1) // size
        self.index.name(chain, token_ids, most)
        if index >= most or not self.index.can_insert(chain, table[index]):
            return None
        return self.offload.find(chain, index)

    def restore(self, table: list[BlockId], chain: PrefixChain, where: Where) -> bool:
        """Fill the next block of `chain` from tier `where`; False if it is gone or damaged."""
        assert self.offload is not None, "nothing to restore from"
        block = table[chain.num_entries]
        found, old = self.offload.restore(chain, where, block)
        if not found:
            return False
        entry = self.index.insert(chain, block, old)
        assert entry is not None, "restorable() was true, but the block cannot be published"
        self.pool.keep(block)
        self.offload.added(entry)
        chain.advance(entry)
        return True

    def _replace(self, table: list[BlockId], index: int, block: BlockId) -> None:
        self.pool.share((block,))
        self.pool.release((table[index],))
        table[index] = block

    # --- blocks -------------------------------------------------------------------------------

    def can_admit(self, match: PrefixMatch, num_tokens: int, *, spare: int = 0) -> bool:
        """Whether a sequence of `num_tokens` that adopts `match` leaves `spare` free blocks."""
        references = self.pool.references
        idle = sum(not references(block) for block in match.blocks)
        missing = self.blocks_for(num_tokens) - len(match.entries)
        return missing + spare <= self.pool.num_free - idle

    def vacate(self, match: PrefixMatch, num_tokens: int) -> bool:
        """Evict blocks for a sequence of `num_tokens` that adopts `match`.

        Returns False if there was no time to save all of them to offload tiers: call again later.
        """
        if self.offload is None:
            return True
        offload, missing = self.offload, self.blocks_for(num_tokens) - len(match.entries)
        return self.pool.vacate(missing, match.blocks, lambda: offload.has_time)

    def grow(self, table: list[BlockId], num_tokens: int) -> bool:
        """Extend `table` to hold `num_tokens` tokens; False, without a change, if it cannot."""
        missing = self.blocks_for(num_tokens) - len(table)
        if missing <= 0:
            return True
        if missing > self.pool.num_free:
            return False
        table.extend(self.pool.take(missing))
        return True

    def truncate(self, table: list[BlockId], num_tokens: int) -> None:
        """Free the blocks of `table` behind the first `num_tokens` tokens."""
        end = self.blocks_for(num_tokens)
        if end < len(table):
            self.pool.release(reversed(table[end:]))
            del table[end:]

    def slide(self, table: list[BlockId], num_tokens: int) -> None:
        """Free the blocks that no token after the first `num_tokens` tokens can see."""
        if not self.window:
            return
        end = first = max(0, num_tokens - self.window + 1) // self.block_size
        while first > 0 and table[first - 1] != self.gone:
            first -= 1
        self.pool.release(reversed(table[first:end]))
        table[first:end] = [self.gone] * (end - first)

    def held(self, table: list[BlockId]) -> list[BlockId]:
        """Return the blocks of `table` that have not been freed by a sliding window."""
        return [block for block in table if block != self.gone] if self.window else table

    def free(self, table: list[BlockId]) -> None:
        """Free the blocks of `table` and empty it.

        The last block is freed first, so that a cached block is evicted after those that continue
        it.
        """
        self.pool.release(reversed(self.held(table)))
        table.clear()

    def check_invariants(self, tables: Iterable[Sequence[BlockId]]) -> None:
        """Raise AssertionError unless all blocks are free, cached, or used by `tables`."""
        uses = [block for table in tables for block in table if block != self.gone]
        self.pool.check_invariants(uses)
        self.index.check_invariants()
        free = self.pool.num_free - self.pool.num_cached
        assert free + self.pool.num_cached + len(set(uses)) == self.num_blocks, "a block is lost"
        named = sum(1 for block in range(self.num_blocks) if BlockId(block) in self.index)
        kept = self.num_cached + sum(1 for block in set(uses) if block in self.index)
        assert named == kept, "a free block has a name"
