"""PublishedBlocks: the prefix index, with the pools and offload tiers that follow its changes."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from cpuserve.core.kv.offload import Offload
from cpuserve.core.kv.pool import BlockPool
from cpuserve.core.kv.prefix import (
    FORGOTTEN,
    BlockHash,
    CachedBlock,
    ChainMark,
    PrefixChain,
    PrefixIndex,
)
from cpuserve.ids import BlockId


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
