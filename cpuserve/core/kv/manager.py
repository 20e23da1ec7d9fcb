"""KvManager: allocate KV blocks for sequences, and share the blocks of equal prefixes.

The layers of a model form cache groups. A sequence has a block table for each group (`Tables`), and
any block can serve any group. A group keeps the keys of all tokens, or only the keys that a sliding
window of `window` tokens sees: blocks before the window are freed while their sequence runs. Their
entries in the table are then set to block `num_blocks`, which is not in the pool and never written.

The states of recurrent layers form one more cache group, the last one. Its blocks are the slots
of a separate pool, with ids after all KV blocks, because a slot is as large as hundreds of blocks.
The slot of block i holds the state at the last multiple of `state_chunk` tokens in that block,
and the data of the tokens since then. Once the block is full, the slot holds the state at its end.
A block without a slot of its own uses the slot of the next block that has one.
A sequence therefore needs two slots: one for the last full block, where a prefix can end,
and one for the current block. Only the states at the end of a prompt or a response,
and at the token where two prompts begin to differ, are published ("snapshots").

An entry of the prefix index has a block for each group.
If a group that keeps all tokens loses its block by eviction, the entry is removed,
since no prefix with this block could be used. A group with a window may lose its block alone:
a prefix can then be used only if it is so long that this block is before its window.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cpuserve.base.ids import BlockId
from cpuserve.config.cache_groups import STATE_CHUNK, CacheUse
from cpuserve.core.kv.events import CacheEvents
from cpuserve.core.kv.offload import Offload
from cpuserve.core.kv.pool import PublishedBlocks, level_of
from cpuserve.core.kv.prefix import (
    FORGOTTEN,
    CachedBlock,
    Digest,
    FoundPrefix,
    PrefixChain,
    PrefixIndex,
    PrefixMatch,
    RestorePlan,
    sha256,
)
from cpuserve.core.kv.table import BlockTable

Tables = list[BlockTable]


class KvManager:
    """Allocates, shares and frees blocks; the requests own the block tables with these blocks.

    With `prefix_caching`, full blocks are published under a hash of their tokens. They stay cached
    after their last use until their memory is needed. `offload` may keep their content for longer.

    use: the cache groups and their windows; None = one group that keeps all tokens.
    num_states: number of slots for the states of recurrent layers,
      0 = the model has no such layers.
    state_chunk: a stored state is updated every state_chunk tokens; it divides block_size.
    events: records the changes of the prefix index.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = True,
        digest: Digest = sha256,
        offload: Offload | None = None,
        use: CacheUse | None = None,
        num_states: int = 0,
        state_chunk: int = STATE_CHUNK,
        events: CacheEvents | None = None,
    ) -> None:
        self.use = use or CacheUse((0,), 0, block_size)
        self.block_size = block_size
        self.has_states = num_states > 0
        self.state_chunk = state_chunk
        # A token needs the state at the end of the block before its own block, at most block_size
        # tokens back. The states therefore have a window of block_size + 1 tokens.
        self.windows = self.use.windows + (block_size + 1,) * self.has_states
        self.slides = any(self.windows)
        # For each group: whether a restored prefix needs all its blocks of this group. A group with
        # a window needs only the blocks that later tokens see. If all groups have windows, the
        # first group still needs all blocks, because an index entry must have at least one block.
        self._whole = [not window for window in self.windows]
        self._whole[0] |= not any(self._whole)
        self.gone = BlockId(num_blocks)
        self.prefix_caching = prefix_caching
        self.offload = offload
        self._spans = [self.use.span(group) for group in range(self.num_groups)]
        seed = offload.seed if offload is not None else None
        self.index = PrefixIndex(block_size, digest, seed, events)
        self.published = PublishedBlocks(self.index, self.windows, num_states, self.gone, offload)
        self.pool, self.states = self.published.pool, self.published.states
        self._pools = self.published.pools

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the cache."""
        return self.pool.num_blocks

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated now: free and cached ones."""
        return self.pool.num_free

    @property
    def num_cached(self) -> int:
        """Number of blocks without references that the prefix index can still find."""
        return self.pool.num_cached

    @property
    def num_groups(self) -> int:
        """Number of cache groups of keys and values."""
        return len(self.use.windows)

    @property
    def usage(self) -> float:
        """Fraction of the blocks in use, 0 to 1."""
        return 1.0 - self.pool.num_free / self.pool.num_blocks

    def new_tables(self) -> Tables:
        """Return the empty block tables of a sequence."""
        return [BlockTable() for _ in self.windows]

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks of one cache group hold `num_tokens` tokens."""
        return self.use.blocks_for(num_tokens)

    def needs(self, num_tokens: int) -> int:
        """Return the most blocks that a sequence of this length holds in all groups together."""
        return self.use.needs(num_tokens)

    def _first(self, group: int, num_tokens: int) -> int:
        """Return the index of the first block that a token after `num_tokens` tokens can see."""
        window = self.windows[group]
        return max(0, num_tokens - window + 1) // self.block_size if window else 0

    def _ends(self, computed: int, num_tokens: int) -> list[int]:
        """Return the length of each KV table for `num_tokens` tokens after `computed` have run."""
        full = self.blocks_for(num_tokens)
        if not any(self.use.windows):
            return [full] * self.num_groups
        return [
            full if span is None else min(full, self._first(group, computed) + span)
            for group, span in enumerate(self._spans)
        ]

    # --- cached prefixes ----------------------------------------------------------------------

    def match_prefix(self, chain: PrefixChain, token_ids: Sequence[int]) -> PrefixMatch:
        """Return the longest cached prefix of `token_ids` that every cache group has.

        The last token is left out: it has to run in any case, because its logits are needed.
        """
        found = self._cached(chain, token_ids)
        entries = found.entries[: found.served]
        end = len(entries)
        tables, blocks = self.new_tables(), []
        for group, table in enumerate(tables):
            first = min(self._first(group, end * self.block_size), end)
            shared = [entry.blocks[group] for entry in entries[first:]]
            table.extend([self.gone] * first + shared)
            blocks += shared
        return PrefixMatch(entries, end * self.block_size, tables, blocks, len(found.entries))

    def num_cached_tokens(self, chain: PrefixChain, token_ids: Sequence[int]) -> int:
        """Return the length of the prefix that `match_prefix` would find."""
        return self._cached(chain, token_ids).served * self.block_size

    def _cached(self, chain: PrefixChain, token_ids: Sequence[int]) -> FoundPrefix:
        """Return the longest cached prefix, and how many of its blocks every cache group has."""
        if not self.prefix_caching:
            return FoundPrefix()
        most = (len(token_ids) - 1) // self.block_size
        found = self.index.search(chain, token_ids, most)
        state = found.last, found.revivals, self.index.alterations
        if found.served_of != state:
            found.served, found.served_of = self._served(found.entries, 0), state
        return found

    def _served(self, entries: Sequence[CachedBlock], begin: int) -> int:
        """Return the length, in blocks, of the longest prefix that every cache group has.

        The sequence already has its first `begin` blocks; `entries` belong to the next blocks.
        Groups without a window have a block in every entry.
        """
        end = begin + len(entries)
        if not self.slides:
            return end
        windows = [group for group, window in enumerate(self.windows) if window]
        while end > begin:
            # If a block inside the window is missing, every shorter prefix with this block also has
            # it in its window. The next candidate therefore ends just before that block.
            missing = end
            for group in windows:
                first = max(begin, self._first(group, end * self.block_size))
                for index in range(first, missing):
                    if entries[index - begin].blocks[group] == FORGOTTEN:
                        missing = index
                        break
            if missing == end:
                return end
            end = missing
        return begin

    def adopt(self, tables: Tables, chain: PrefixChain, match: PrefixMatch) -> None:
        """Let the empty `tables` begin with the shared blocks of `match`."""
        assert not any(tables), "only a new sequence can adopt a prefix"
        self.published.judge(chain, match.entries)
        self._share(match.blocks)
        for table, prefix_blocks in zip(tables, match.tables, strict=True):
            table.extend(prefix_blocks)
        for entry in match.entries:
            chain.advance(entry)
        chain.found = FoundPrefix()

    def catch_up(
        self, tables: Tables, chain: PrefixChain, token_ids: Sequence[int], computed: int
    ) -> int:
        """Replace blocks after `computed` tokens by blocks that other sequences have published.

        Returns how many tokens need not run any more. The last token always has to run.
        """
        size = self.block_size
        begin = chain.num_entries
        if not self.prefix_caching or computed != begin * size or chain.plan is not None:
            return 0
        most = (len(token_ids) - 1) // size
        entries = self.index.walk(chain, token_ids, begin, most, chain.last)
        if not entries:
            return 0
        end = self._served(entries, begin)
        for group, table in enumerate(tables):
            first = self._first(group, end * size)
            for index, entry in enumerate(entries[: end - begin], begin):
                self._put(table, index, entry.blocks[group] if index >= first else self.gone)
        for entry in entries[: end - begin]:
            chain.advance(entry)
        return (end - begin) * size

    def _put(self, table: BlockTable, index: int, block: BlockId) -> None:
        """Make `block` entry `index` of `table`: it replaces the block there, or is appended."""
        if block != self.gone:
            self._share((block,))
        if index == len(table):
            table.append(block)
            return
        if table[index] != self.gone:
            self.published.pool_of(table[index]).release((table[index],))
        table.put(index, block)

    def _share(self, blocks: Sequence[BlockId]) -> None:
        if not self.has_states:
            self.pool.share(blocks)
            return
        for block in blocks:
            self.published.pool_of(block).share((block,))

    def publish(
        self,
        tables: Tables,
        chain: PrefixChain,
        token_ids: Sequence[int],
        num_tokens: int,
        *,
        computed: bool,
    ) -> None:
        """Publish the full blocks of the first `num_tokens` tokens for other sequences.

        computed: whether the tokens have been computed. A computed block is replaced by
        a published block with equal content. A block that is not computed yet stays in the table,
        because the next step writes to it. States are published only after they are computed:
        a request that found a state earlier would read it in the same step that computes it.
        """
        if not self.prefix_caching or (self.has_states and not computed):
            return
        num_full = num_tokens // self.block_size
        if chain.num_entries >= num_full:
            return
        self.index.name(chain, token_ids, num_full)
        new_entries: list[CachedBlock] = []
        new_blocks = zip(*(table[chain.num_entries : num_full] for table in tables), strict=True)
        for blocks in map(list, new_blocks):
            if self.slides and not self._leave_out(blocks, chain):
                break
            entry = self.index.insert(chain, blocks)
            if entry is None:
                break
            if entry.blocks is blocks:
                new_entries.append(entry)
            elif not computed:
                break
            else:
                self._unite(tables, chain, entry)
            chain.advance(entry)
        self.published.keep(new_entries)
        chain.own += new_entries

    def _leave_out(self, blocks: list[BlockId], chain: PrefixChain) -> bool:
        """Replace each of `blocks`, the next of the chain, that cannot be published by FORGOTTEN.

        Returns whether a block remains that can be published.
        """
        for group, block in enumerate(blocks):
            if block == self.gone:
                blocks[group] = FORGOTTEN
        if self.has_states and chain.num_entries not in chain.snapshots:
            blocks[-1] = FORGOTTEN
        return any(block != FORGOTTEN for block in blocks)

    def publish_end(self, tables: Tables, chain: PrefixChain, computed: int) -> None:
        """Publish the state at the end of the last full block of a sequence that is about to end.

        computed: number of tokens of the sequence that have run.
        """
        entry, index = chain.last, chain.num_entries - 1
        if not self.has_states or not self.prefix_caching or entry is None or entry.forgotten:
            return
        if chain.plan is not None:  # the states of these tokens were neither computed nor restored
            return
        if entry.blocks[-1] != FORGOTTEN or computed // self.block_size != index + 1:
            return
        own = next((s for s in tables[-1][index:] if s != self.gone), self.gone)
        # If this block and the next one share a slot, the first full state chunk
        # (state_chunk tokens) of the next block has overwritten the state.
        if tables[-1][index] == self.gone and computed % self.block_size >= self.state_chunk:
            return
        if own != self.gone:
            self.published.fill(entry, self.num_groups, own)

    def _is_state(self, group: int) -> bool:
        return group == self.num_groups

    def _unite(self, tables: Tables, chain: PrefixChain, entry: CachedBlock) -> None:
        """Replace the own blocks of the chain's next entry by the published blocks of `entry`.

        If a group has no published block, because it was evicted, the own block is published.
        """
        index = chain.num_entries
        for group, table in enumerate(tables):
            own, published = table[index], entry.blocks[group]
            if own in (published, self.gone):
                continue
            if published != FORGOTTEN:
                self._put(table, index, published)
            elif self._is_state(group) and index not in chain.snapshots:
                continue
            else:
                self.published.fill(entry, group, own)

    # --- offload ------------------------------------------------------------------------------

    def restorable(
        self, tables: Tables, chain: PrefixChain, token_ids: Sequence[int], computed: int
    ) -> RestorePlan | None:
        """Return a plan to restore blocks after `computed` tokens (never the last token), or None.

        A sequence can continue only after tokens that every cache group has.
        A group that keeps all tokens needs all its blocks before the next token, a group
        with a window needs the blocks in the window, and the group of states needs the last block.
        """
        size, index = self.block_size, chain.num_entries
        if self.offload is None or not self.prefix_caching or chain.failed:
            return None
        most = (len(token_ids) - 1) // size
        if computed != index * size or index >= most:
            return None
        self.index.name(chain, token_ids, most)
        entry = self.index.find(chain, index, chain.last)
        own = [table[index] for table in tables if index < len(table)]
        if entry is None and not self.index.can_insert(chain, own):
            return None
        # Without windows, each block is planned and restored separately.
        end = most if self.slides else index + 1
        return self._restore_plan(self.offload, chain, entry, end)

    def _restore_plan(
        self, offload: Offload, chain: PrefixChain, entry: CachedBlock | None, most: int
    ) -> RestorePlan | None:
        """Return the plan for the most blocks that can be restored, up to block `most` - 1.

        entry: the index's entry for the next block of `chain`, or None.
        Returns None if the cache has the blocks of all groups, which `catch_up` takes.
        """
        begin = chain.num_entries
        held_from = [0] * len(self.windows)  # a group has all blocks from this index on
        places: set[int] = set()
        plan = None
        for index in range(begin, most):
            if index > begin and entry is not None:
                entry = self.index.find(chain, index, entry)
            for group, whole in enumerate(self._whole):
                if entry is not None and entry.blocks[group] != FORGOTTEN:
                    continue
                place = offload.find(chain, index, group)
                if place is not None:
                    places.add(place)
                elif whole:
                    return plan
                else:
                    held_from[group] = index + 1
            seen = (index + 1) * self.block_size
            if places and all(first <= self._first(g, seen) for g, first in enumerate(held_from)):
                at_end = entry.blocks[-1] if entry is not None else FORGOTTEN
                slowest = offload.tiers[max(places)].name
                has_state = self.has_states and at_end == FORGOTTEN
                plan = RestorePlan(begin, index + 1, slowest, has_state)
        return plan

    def restore(self, tables: Tables, chain: PrefixChain, plan: RestorePlan) -> bool:
        """Restore the next block of `chain` as planned; False if the block is gone or damaged.

        The sequence cannot continue before all blocks of `plan` are restored (PrefixChain.plan).
        """
        assert self.offload is not None, "nothing to restore from"
        index = chain.num_entries
        chain.plan = plan
        entry = self.index.find(chain, index, chain.last)
        held = entry.blocks if entry is not None else [FORGOTTEN] * len(tables)
        blocks, old = [FORGOTTEN] * len(tables), None
        for group, table in enumerate(tables):
            if not self._whole[group] and index < self._first(group, plan.end * self.block_size):
                continue  # no token after the plan sees this block
            if held[group] != FORGOTTEN:
                self._put(table, index, held[group])
                continue
            if index >= len(table):  # in a full cache, the table of a window could not grow
                return False
            block = self._block_to_fill(group, table, index)
            found, known = self.offload.restore(chain, group, block)
            if not found:
                return False
            blocks[group] = block
            old = old or known
        if entry is None:
            entry = self.index.insert(chain, blocks, old)
            if entry is None:
                return False
            self.published.keep((entry,))
        else:
            for group, block in enumerate(blocks):
                if block != FORGOTTEN:
                    self.published.fill(entry, group, block)
        chain.advance(entry)
        return True

    def _block_to_fill(self, group: int, table: BlockTable, index: int) -> BlockId:
        """Return block `index` of `table`; in the group of states, take a slot for it if needed.

        Earlier slots are freed then, so that the sequence has at most STATES_OF_ONE slots.
        """
        if self._is_state(group) and table[index] == self.gone:
            self.states.release(table.leave(index, self.gone))
            table.put(index, self.states.take(1)[0])
        return table[index]

    # --- blocks of the tables -----------------------------------------------------------------

    def _missing(self, match: PrefixMatch, num_tokens: int) -> int:
        """Return how many new blocks a sequence needs after it has adopted `match`."""
        have = len(match.entries)
        return sum([max(0, end - have) for end in self._ends(match.num_tokens, num_tokens)])

    def can_admit(self, match: PrefixMatch, num_tokens: int, *, spare: int = 0) -> bool:
        """Whether `spare` blocks stay free if a sequence of `num_tokens` adopts `match`."""
        references = self.pool.references
        idle = sum(not references(block) for block in match.blocks if block < self.gone)
        return self._missing(match, num_tokens) + spare <= self.pool.num_free - idle

    def vacate(self, match: PrefixMatch, num_tokens: int) -> bool:
        """Evict blocks for a sequence of `num_tokens` tokens that adopts `match`.

        Returns False if there was no time to save all of them to offload tiers: call again later.
        """
        if self.offload is None:
            return True
        offload, missing = self.offload, self._missing(match, num_tokens)
        return self.pool.vacate(missing, match.blocks, lambda: offload.has_time)

    def grow(
        self,
        tables: Tables,
        num_tokens: int,
        computed: int = 0,
        snapshots: Iterable[int] = (),
    ) -> bool:
        """Extend `tables` to `num_tokens` tokens; False, without a change, if blocks are missing.

        Tables of windows are extended only as far as the step after `computed` tokens needs.
        snapshots: positions in the block table of new blocks that get a state slot of their own,
          which keeps the recurrent state at the end of the block.
        """
        ends = self._ends(computed, num_tokens)
        missing = [max(0, end - len(table)) for end, table in zip(ends, tables, strict=False)]
        if sum(missing) > self.pool.num_free:
            return False
        for table, count in zip(tables, missing, strict=False):
            if count:
                table.extend(self.pool.take(count))
        if self.has_states:
            self._grow_states(tables[-1], num_tokens, snapshots)
        return True

    def _grow_states(self, table: BlockTable, num_tokens: int, snapshots: Iterable[int]) -> None:
        """Append blocks; the last one, the last full one and `snapshots` get their own state slots.

        There are enough slots: the pool has STATES_OF_ONE slots for each request that can run.
        """
        end = self.blocks_for(num_tokens)
        wanted = {end - 1, num_tokens // self.block_size - 1, *snapshots}
        for index in range(len(table), end):
            table.append(self.states.take(1)[0] if index in wanted else self.gone)

    def snapshots_of(self, match: PrefixMatch, num_tokens: int) -> frozenset[int]:
        """Return the positions in the block table where a sequence with `match` keeps its states.

        The blocks are the last full one of its `num_tokens` tokens, and the last one in common with
        another sequence if it has no state yet, because a third sequence may begin like these two.
        """
        if not self.has_states:
            return frozenset()
        begin, last = len(match.entries), num_tokens // self.block_size - 1
        return frozenset(i for i in (match.branch - 1, last) if begin <= i <= last)

    def truncate(self, tables: Tables, num_tokens: int) -> None:
        """Free the blocks of `tables` after the first `num_tokens` tokens."""
        end = self.blocks_for(num_tokens)
        for pool, table in zip(self._pools, tables, strict=True):
            if end < len(table):
                pool.release(reversed(self._held(table[end:])))
                table.cut(end)

    def slide(self, tables: Tables, num_tokens: int) -> None:
        """Free the blocks that no token after the first `num_tokens` tokens can see."""
        if not self.slides:
            return
        for group, table in enumerate(tables):
            left = table.leave(min(self._first(group, num_tokens), len(table)), self.gone)
            self._pools[group].release(reversed(left))

    def reach(self, tables: Tables, computed: int, num_tokens: int) -> int:
        """Free blocks as `slide` does, and extend `tables` up to `num_tokens` tokens if possible.

        Returns the number of tokens that the tables then have blocks for: at least `computed`.
        """
        if not self.slides:
            return num_tokens
        self.slide(tables, computed)
        if self.use.ahead and any(self.use.windows):
            num_tokens = min(num_tokens, computed + self.use.ahead)
        while num_tokens > computed and not self.grow(tables, num_tokens, computed):
            num_tokens = (num_tokens - 1) // self.block_size * self.block_size
        return max(num_tokens, computed)

    def held(self, tables: Sequence[list[BlockId]]) -> list[BlockId]:
        """Return the blocks in `tables`, without entries that a sliding window has freed."""
        return [block for table in tables for block in self._held(table)]

    def _held(self, table: list[BlockId]) -> list[BlockId]:
        return [block for block in table if block != self.gone] if self.slides else table

    def num_held(self, tables: Tables) -> int:
        """Return the number of KV blocks in `tables`; slots of states are not counted."""
        return sum(block < self.gone for table in tables for block in table)

    def free(self, tables: Tables, *, continues: bool = False) -> None:
        """Free the blocks of `tables` and empty the tables.

        continues: the sequence is a turn of a conversation, so its blocks stay cached longer.
        Blocks are freed from the last to the first, so that a block is evicted after its followers.
        """
        level = level_of(len(tables[0]) * self.block_size, continued=continues) if tables else 0
        for pool, table in zip(self._pools, tables, strict=True):
            pool.release(reversed(self._held(table)), level)
            table.cut(0)

    def check_invariants(self, tables: Iterable[Tables]) -> None:
        """Raise AssertionError unless each block is free, cached, or in one of `tables`."""
        held = [block for each in tables for block in self.held(each)]
        self.states.check_invariants(block for block in held if block > self.gone)
        uses = [block for block in held if block < self.gone]
        self.pool.check_invariants(uses)
        self.index.check_invariants()
        for entry in self.index:
            lost = [g for g, block in enumerate(entry.blocks) if block == FORGOTTEN]
            assert all(self.windows[g] for g in lost), "a group that keeps everything lost a block"
        free = self.pool.num_free - self.pool.num_cached
        assert free + self.pool.num_cached + len(set(uses)) == self.num_blocks, "a block is lost"
        named = sum(1 for block in range(self.num_blocks) if BlockId(block) in self.index)
        kept = self.num_cached + sum(1 for block in set(uses) if block in self.index)
        assert named == kept, "a free block has a name"
