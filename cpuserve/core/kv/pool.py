"""BlockPool: KV block ids with reference counts; PublishedBlocks: pools with the prefix index."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from cpuserve.base.ids import BlockId
from cpuserve.core.kv.offload import Offload
from cpuserve.core.kv.prefix import (
    FORGOTTEN,
    BlockHash,
    CachedBlock,
    ChainMark,
    PrefixChain,
    PrefixIndex,
)

# A cached block has a weight, a power of two that is stored as its exponent (level).
# A heavier block is evicted later. Nobody notices that a prompt of 500 tokens is computed again,
# but 30,000 tokens take minutes. A token of a long prompt also takes more time, since it attends
# to all tokens before it. So the weight doubles when a prompt is 8 (2 ** _STEP_BITS) times longer:
# prompts below _SHORT tokens have the weight 1, and the greatest weight is 2 ** _MOST_COST.
_SHORT, _STEP_BITS, _MOST_COST = 1024, 3, 3
# A block of a conversation counts as 8 (2 ** _CONTINUED) times younger than other blocks,
# because most prompts outside of conversations never come again.
_CONTINUED = 3
_LEVELS = _MOST_COST + _CONTINUED + 1


def level_of(num_tokens: int, *, continued: bool) -> int:
    """Return the level (exponent of the weight) for blocks of a sequence of `num_tokens` tokens.

    continued: the sequence continues another one, as the turns of a conversation do.
    """
    cost = min(-(-(num_tokens // _SHORT).bit_length() // _STEP_BITS), _MOST_COST)
    return cost + _CONTINUED * continued


class BlockPool:
    """Owns the block ids first .. first + num_blocks - 1.

    A block is in use (it has references), cached (it has no references,
    but `keep` has kept its content) or free. `take` hands out free blocks first.
    If none is free, `take` evicts cached blocks: it calls `on_evict(block)` before it reuses one.
    `continuations(block)` returns the blocks that follow `block` in longer prefixes, each after
    its predecessors. These blocks cannot be used without `block`, so they are evicted before it.

    The block with the greatest age / 2 ** level is evicted first.
    The age of a block is the number of blocks that were taken since its last release.
    The level of a block is the highest level of the sequences that have released it (`level_of`).

    The free list is a stack that starts with the low ids on top.
    The memory of a KV block is committed when the block is first used. Reusing the block
    that was freed last keeps it in the caches of the CPU, and keeps the resident size small.
    """

    def __init__(
        self,
        num_blocks: int,
        on_evict: Callable[[BlockId], object] | None = None,
        continuations: Callable[[BlockId], Iterable[BlockId]] = lambda _: (),
        first: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self._first, end = first, first + num_blocks
        self._free = [BlockId(i) for i in range(end - 1, first - 1, -1)]
        # The cached blocks of each level, the least recently released block first.
        # The values are _num_taken at the time of the release.
        self._cached: list[OrderedDict[BlockId, int]] = [OrderedDict() for _ in range(_LEVELS)]
        self._num_cached = 0
        self._num_taken = 0
        self._references = [0] * end  # reference counts by block id, unused below `first`
        self._kept = bytearray(end)
        self._level = bytearray(end)
        self._on_evict = on_evict
        self._continuations = continuations

    @property
    def num_free(self) -> int:
        """The number of blocks that `take` can hand out: free and cached ones."""
        return len(self._free) + self._num_cached

    @property
    def num_cached(self) -> int:
        """The number of cached blocks: they have no references, but their content is kept."""
        return self._num_cached

    def references(self, block: BlockId) -> int:
        """Return the reference count of `block`."""
        return self._references[block]

    def take(self, count: int) -> list[BlockId]:
        """Return `count` blocks with one reference each; the caller has checked `num_free`."""
        assert 0 <= count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        # Count before _evict, so that blocks released just now have an age.
        self._num_taken += count
        free = self._free
        taken = [free.pop() if free else self._evict() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: Iterable[BlockId]) -> None:
        """Add a reference to each of `blocks`, which are in use or cached."""
        references = self._references
        for block in blocks:
            if not references[block]:
                self._uncache(block)
            references[block] += 1

    def _uncache(self, block: BlockId) -> None:
        cached = self._cached[self._level[block]]
        assert block in cached, f"block {block} is free"
        del cached[block]
        self._num_cached -= 1

    def release(self, blocks: Iterable[BlockId], level: int = 0) -> None:
        """Remove a reference from each of `blocks`; blocks without references can be reused.

        level: the level of the sequence that held the blocks (`level_of`).
        """
        references, levels = self._references, self._level
        for block in blocks:
            assert references[block] > 0, f"block {block} released twice"
            references[block] -= 1
            if level > levels[block]:
                levels[block] = level
            if references[block]:
                continue
            if self._kept[block]:
                self._cached[levels[block]][block] = self._num_taken
                self._num_cached += 1
            else:
                levels[block] = 0
                self._free.append(block)

    def keep(self, blocks: Iterable[BlockId]) -> None:
        """Let the last release of `blocks`, which are in use, cache them, not free them."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is not in use"
            self._kept[block] = 1

    def drop(self, block: BlockId) -> None:
        """Discard the content of `block`: it becomes free as soon as it has no references."""
        self._kept[block] = 0
        if not self._references[block] and block in self._cached[self._level[block]]:
            self._uncache(block)
            self._level[block] = 0
            self._free.append(block)

    def vacate(self, count: int, kept: Sequence[BlockId], go_on: Callable[[], bool]) -> bool:
        """Evict cached blocks until `count` blocks are free, but no block of `kept`.

        Returns False if `go_on()` returned False before that; blocks evicted by then stay free.
        kept: the blocks of a prefix, in order; blocks of another pool are ignored.
        """
        # A reference to each kept block protects it from eviction.
        end = len(self._references)
        own = [block for block in kept if self._first <= block < end]
        idle = [block for block in own if not self._references[block]]
        self.share(idle)
        try:
            while len(self._free) < count and self._num_cached:
                if not go_on():
                    return False
                self._free.append(self._evict())
            return True
        finally:
            self.release(reversed(idle))

    def _evict(self) -> BlockId:
        """Evict the block with the greatest age / 2 ** level, or a cached block after it."""
        victims, most, now = self._cached[0], -1, self._num_taken
        for level, cached in enumerate(self._cached):
            if cached:
                age = now - cached[next(iter(cached))] >> level
                if age > most:
                    victims, most = cached, age
        oldest, end = next(iter(victims)), len(self._references)
        for block in self._continuations(oldest):
            if self._first <= block < end and not self._references[block]:  # a block of this pool
                self._move_before(oldest, block, victims)
        block, _ = victims.popitem(last=False)
        self._num_cached -= 1
        self._kept[block] = self._level[block] = 0
        if self._on_evict is not None:
            self._on_evict(block)
        return block

    def _move_before(
        self, oldest: BlockId, block: BlockId, victims: OrderedDict[BlockId, int]
    ) -> None:
        """Make `block` the first of `victims`, so that it is evicted before the block `oldest`."""
        released = victims[oldest]
        del self._cached[self._level[block]][block]
        self._level[block] = self._level[oldest]
        victims[block] = released
        victims.move_to_end(block, last=False)

    def check_invariants(self, uses: Iterable[BlockId]) -> None:
        """Raise AssertionError unless each block has as many references as entries in `uses`."""
        wanted = [0] * len(self._references)
        for block in uses:
            wanted[block] += 1
        assert wanted == self._references, "reference counts differ from the block tables"
        free = set(self._free)
        cached = {block for level in self._cached for block in level}
        assert len(free) == len(self._free), "a block is twice in the free list"
        assert not free & cached, "a block is free and cached"
        assert self._num_cached == sum(map(len, self._cached)) == len(cached), "miscounted"
        idle = {i for i, count in enumerate(wanted) if not count and i >= self._first}
        assert free | cached == idle, "free list and reference counts disagree"
        assert all(self._kept[block] for block in cached), "a cached block is not kept"
        assert not any(self._kept[block] for block in free), "a kept block is in the free list"
        assert not any(self._level[block] for block in free), "a free block has a level"
        for level, blocks in enumerate(self._cached):
            assert all(self._level[block] == level for block in blocks), "another level"
            assert list(blocks.values()) == sorted(blocks.values()), "a level is out of order"


class PublishedBlocks:
    """Adds and removes entries of the index together with their blocks in the pools.

    windows: the window of each cache group in tokens, 0 = the group keeps all tokens.
      If num_states > 0, the last group has the states of recurrent layers, in a pool of its own.
    gone: the id that replaces freed blocks in block tables.
      The id equals the number of KV blocks, and the ids of state slots are greater.
    """

    def __init__(
        self,
        index: PrefixIndex,
        windows: Sequence[int],
        num_states: int,
        gone: BlockId,
        offload: Offload | None,
    ) -> None:
        self.index = index
        self.offload = offload
        self.pool = BlockPool(gone, self.evicted, self._continuations)
        self.states = BlockPool(num_states, self.evicted, self._continuations, gone + 1)
        self.windows = windows
        self.gone = gone
        has_states = num_states > 0
        # The keys of the entries that were evicted last, at most as many as the cache has blocks.
        self._evicted: OrderedDict[BlockHash, None] = OrderedDict()
        self._chance = random.Random(0)
        self.pools = [self.pool] * (len(windows) - has_states) + [self.states] * has_states

    def pool_of(self, block: BlockId) -> BlockPool:
        """Return the pool of `block`: the pool of states or the pool of KV blocks."""
        return self.states if block > self.gone else self.pool

    def keep(self, entries: Sequence[CachedBlock]) -> None:
        """Keep the content of the blocks of new `entries` after all requests have released them."""
        for group, pool in enumerate(self.pools):
            blocks = [entry.blocks[group] for entry in entries]
            pool.keep([block for block in blocks if block != FORGOTTEN])
        if self.offload is not None:
            for entry in entries:
                for group, block in enumerate(entry.blocks):
                    if block != FORGOTTEN:
                        self.offload.added(entry, group)

    def fill(self, entry: CachedBlock, group: int, block: BlockId) -> None:
        """Make `block` the block of `entry` in `group`, unless `block` belongs to another entry."""
        if self.index.fill(entry, group, block):
            self.pools[group].keep((block,))
            if self.offload is not None:
                self.offload.filled(entry, group)

    def unpublish(self, blocks: Iterable[BlockId]) -> None:
        """Remove `blocks` from the index, because the step that should compute them failed."""
        for block in blocks:
            entry = self.index.entry(block)
            if entry is not None:
                self._forget(entry)

    def clear(self) -> None:
        """Remove all blocks from the index; sequences keep the blocks that they use."""
        self._forget_all(list(self.index))
        self._evicted.clear()
        if self.index.events is not None:
            self.index.events.cleared()

    def unpublish_own(self, chain: PrefixChain) -> None:
        """Remove only the blocks that this sequence has published from the index."""
        self._forget_all(chain.own)
        chain.own.clear()

    def unpublish_since(self, chain: PrefixChain, mark: ChainMark) -> None:
        """Return the chain to `mark`, and remove the blocks published since then from the index."""
        self._forget_all(chain.return_to(mark))

    def _forget_all(self, entries: Iterable[CachedBlock]) -> None:
        for entry in entries:
            if not entry.forgotten:
                self._forget(entry)

    def _forget(self, entry: CachedBlock) -> None:
        """Remove `entry` and its descendants: their keys depend on the content of `entry`."""
        parent = entry.parent
        for each in (*reversed(self.index.continuations(entry)), entry):
            if self.offload is not None:
                self.offload.removed(each)
            for block in self.index.forget(each):
                self.pool_of(block).drop(block)
        self._prune(parent)

    def _prune(self, entry: CachedBlock | None) -> None:
        """Remove `entry` and its ancestors, as long as they have neither blocks nor children."""
        while entry is not None and not entry.forgotten and not entry.children and not entry.held:
            parent = entry.parent
            self.index.forget(entry)
            entry = parent

    def evicted(self, block: BlockId) -> None:
        """Remove a block that will be reused, and the entries that need it, from the index."""
        entry = self.index.entry(block)
        assert entry is not None, "a cached block has no name"
        group = entry.blocks.index(block)
        if self.windows[group]:
            if self.offload is not None:
                self.offload.evicted(entry, group)
            self.index.empty(entry, group)
            self._prune(entry)
            return
        for child in list(entry.children):
            self._forget(child)
        if self.offload is not None:
            for each, other in enumerate(entry.blocks):
                if other != FORGOTTEN:
                    self.offload.evicted(entry, each)
        for held in self.index.forget(entry):
            if held != block:
                self.pool_of(held).drop(held)
        self._evicted[entry.key] = None
        if len(self._evicted) > self.gone:
            self._evicted.popitem(last=False)

    def judge(self, chain: PrefixChain, entries: Sequence[CachedBlock]) -> None:
        """Set chain.continues: whether the sequence is a turn of a conversation.

        entries: the cached prefix of the sequence. The sequence is a turn of a conversation if it
        is the first sequence that continues after exactly this prefix. Many sequences continue
        after a common system prompt, but they are not the turns of one conversation.

        If the next block of the sequence was evicted lately, the cache has no room for
        all conversations. If each conversation replaced the oldest one, none would be in the cache
        when its next turn comes. Such a sequence therefore counts as a turn only
        with a probability of one half, and blocks of other conversations stay in the cache.
        """
        end = len(entries)
        if end < len(chain.keys) and chain.keys[end] in self._evicted:
            chain.continues = self._chance.random() < 0.5
        else:
            chain.continues = bool(end) and not entries[-1].continued
        if end:
            entries[-1].continued = True

    def _continuations(self, block: BlockId) -> list[BlockId]:
        """Return the blocks that can only be used together with `block`, each after its parent.

        A sequence frees its last block first, so a block is usually freed before its parent.
        But if another sequence has shared the block and not the parent, the parent is freed first.
        """
        entry = self.index.entry(block)
        assert entry is not None, "a cached block has no name"
        if not entry.children or self.windows[entry.blocks.index(block)]:
            return []
        return [held for child in self.index.continuations(entry) for held in child.held]
