"""KvManager: gives sequences the blocks their tokens need, and shares those that exist already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cpuserve.core.kv.pool import BlockPool
from cpuserve.core.kv.prefix import (
    FORGOTTEN,
    CachedBlock,
    Digest,
    PrefixChain,
    PrefixIndex,
    PrefixMatch,
    sha256,
)
from cpuserve.core.kv.tiers import Tiers, Where
from cpuserve.ids import BlockId


class KvManager:
    """Block tables grow, are shared and are freed through here; they live in the requests.

    With `prefix_caching` full blocks are published under the name of their tokens, and stay after
    their last user until the room is needed. `tiers` may keep them for longer.

    window: keys a token sees at most in every layer, itself included (0 = all of them). Blocks left
    of it are freed while their sequence runs; block number `num_blocks`, which is not the pool's
    and which nobody writes, takes their place in the table.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = True,
        digest: Digest = sha256,
        tiers: Tiers | None = None,
        window: int = 0,
    ) -> None:
        self.block_size = block_size
        self.window = window
        self.gone = BlockId(num_blocks)
        self.prefix_caching = prefix_caching
        self.tiers = tiers
        disk = tiers.disk if tiers is not None else None
        self.index = PrefixIndex(block_size, digest, disk.seed if disk is not None else None)
        self.pool = BlockPool(num_blocks, self._evicted)

    @property
    def num_blocks(self) -> int:
        """All blocks of the cache."""
        return self.pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be given out now; cached ones are among them."""
        return self.pool.num_free

    @property
    def num_cached(self) -> int:
        """Blocks that nobody uses and whose prefix can still be found."""
        return self.pool.num_cached

    @property
    def usage(self) -> float:
        """Fraction of the blocks in use, 0 to 1."""
        return 1.0 - self.pool.num_free / self.pool.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    # --- prefixes -----------------------------------------------------------------------------

    def match_prefix(self, chain: PrefixChain, token_ids: Sequence[int]) -> PrefixMatch:
        """Blocks that hold a prefix of `token_ids`, all but the last token at most.

        The last token must run whatever is cached: its logits are what a step is for.
        """
        if not self.prefix_caching:
            return PrefixMatch()
        most = (len(token_ids) - 1) // self.block_size
        self.index.name(chain, token_ids, most)
        entries = self.index.walk(chain, most)
        return PrefixMatch(entries, len(entries) * self.block_size)

    def adopt(self, table: list[BlockId], chain: PrefixChain, match: PrefixMatch) -> None:
        """Start the empty `table` with the shared blocks of `match`."""
        assert not table, "only a new sequence adopts a prefix"
        self.pool.share(match.blocks)
        table.extend(match.blocks)
        for entry in match.entries:
            chain.advance(entry)

    def catch_up(
        self, table: list[BlockId], chain: PrefixChain, token_ids: Sequence[int], computed: int
    ) -> int:
        """Replace blocks after `computed` tokens by some that have been published meanwhile.

        Returns how many tokens need not run now (again all but the last at most).
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
        """Name the full blocks among the first `num_tokens` tokens, so that others find them.

        computed: the tokens have run. Then a block whose content another one already has is given
        up for that one. Before, its tokens still have to be written somewhere, so it stays.
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
                if self.tiers is not None:
                    self.tiers.added(entry)
            elif not computed:
                return
            else:
                self._replace(table, index, entry.block)
            chain.advance(entry)

    def unpublish(self, table: Iterable[BlockId]) -> None:
        """What these blocks hold must not be found any more: its step failed."""
        for block in table:
            entry = self.index.entry(block)
            if entry is not None:
                self._forget(entry)

    def unpublish_own(self, chain: PrefixChain) -> None:
        """What this sequence has published must not be found any more; what it has found may."""
        for entry in chain.own:
            if entry.block != FORGOTTEN:
                self._forget(entry)
        chain.own.clear()

    def _forget(self, entry: CachedBlock) -> None:
        if self.tiers is not None:
            self.tiers.removed(entry)
        block = entry.block
        self.index.forget(entry)
        self.pool.drop(block)

    def clear_prefixes(self) -> None:
        """Forget every prefix, in all tiers; sequences that run keep their blocks."""
        self.unpublish([BlockId(block) for block in range(self.num_blocks)])
        if self.tiers is not None:
            self.tiers.clear()

    def _evicted(self, block: BlockId) -> None:
        entry = self.index.entry(block)
        assert entry is not None, "a cached block has no name"
        if self.tiers is not None:
            self.tiers.evicted(entry)
        self.index.forget(entry)

    # --- tiers --------------------------------------------------------------------------------

    def restorable(
        self, table: list[BlockId], chain: PrefixChain, token_ids: Sequence[int], computed: int
    ) -> Where | None:
        """Where the block after `computed` tokens can be restored from (never the last token's)."""
        size, index = self.block_size, chain.num_entries
        if self.tiers is None or not self.prefix_caching or computed != index * size:
            return None
        most = (len(token_ids) - 1) // size
        self.index.name(chain, token_ids, most)
        if index >= most or not self.index.can_insert(chain, table[index]):
            return None
        return self.tiers.find(chain, index)

    def restore(self, table: list[BlockId], chain: PrefixChain, where: Where) -> bool:
        """Fill the block that `restorable` meant from there; False if it is gone or damaged."""
        assert self.tiers is not None, "nothing to restore from"
        block = table[chain.num_entries]
        found, old = self.tiers.restore(chain, where, block)
        if not found:
            return False
        entry = self.index.insert(chain, block, old)
        assert entry is not None, "restorable() promised a name"
        self.pool.keep(block)
        self.tiers.added(entry)
        chain.advance(entry)
        return True

    def _replace(self, table: list[BlockId], index: int, block: BlockId) -> None:
        self.pool.share((block,))
        self.pool.release((table[index],))
        table[index] = block

    # --- blocks -------------------------------------------------------------------------------

    def can_admit(self, match: PrefixMatch, num_tokens: int, *, spare: int = 0) -> bool:
        """Whether a sequence of `num_tokens` that adopts `match` leaves `spare` blocks to give."""
        references = self.pool.references
        idle = sum(not references(block) for block in match.blocks)
        missing = self.blocks_for(num_tokens) - len(match.entries)
        return missing + spare <= self.pool.num_free - idle

    def vacate(self, match: PrefixMatch, num_tokens: int) -> bool:
        """Evict what has to leave for a sequence of `num_tokens` that adopts `match`.

        False if tiers are to have some of it and there was no time for all: go on later.
        """
        if self.tiers is None:
            return True
        tiers, missing = self.tiers, self.blocks_for(num_tokens) - len(match.entries)
        return self.pool.vacate(missing, set(match.blocks), lambda: tiers.has_time)

    def grow(self, table: list[BlockId], num_tokens: int) -> bool:
        """Extend `table` so that it holds `num_tokens` tokens; False, and nothing, if it cannot."""
        missing = self.blocks_for(num_tokens) - len(table)
        if missing <= 0:
            return True
        if missing > self.pool.num_free:
            return False
        table.extend(self.pool.take(missing))
        return True

    def slide(self, table: list[BlockId], num_tokens: int) -> None:
        """Free the blocks that no token after the first `num_tokens` can see."""
        if not self.window:
            return
        end = first = max(0, num_tokens - self.window + 1) // self.block_size
        while first > 0 and table[first - 1] != self.gone:
            first -= 1
        self.pool.release(reversed(table[first:end]))
        table[first:end] = [self.gone] * (end - first)

    def held(self, table: list[BlockId]) -> list[BlockId]:
        """The blocks of `table` that are still there."""
        return [block for block in table if block != self.gone] if self.window else table

    def free(self, table: list[BlockId]) -> None:
        """Give the blocks of `table` back and empty it.

        Last one first: so a cached block is never evicted before those that continue it.
        """
        self.pool.release(reversed(self.held(table)))
        table.clear()

    def check_invariants(self, tables: Iterable[Sequence[BlockId]]) -> None:
        """AssertionError unless `tables` are all there is: free + used + cached = all."""
        uses = [block for table in tables for block in table if block != self.gone]
        self.pool.check_invariants(uses)
        self.index.check_invariants()
        free = self.pool.num_free - self.pool.num_cached
        assert free + self.pool.num_cached + len(set(uses)) == self.num_blocks, "a block is lost"
        named = sum(1 for block in range(self.num_blocks) if BlockId(block) in self.index)
        kept = self.num_cached + sum(1 for block in set(uses) if block in self.index)
        assert named == kept, "a free block has a name"
