"""BlockPool: KV block ids with reference counts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from cpuserve.ids import BlockId


class BlockPool:
    """Owns the block ids first .. first + num_blocks - 1.

    A block is in use (it has references), cached (it has none, but its content is kept: see `keep`)
    or free. `take` hands out free blocks first and then evicts cached ones in least-recently-used
    order; it calls `on_evict(block)` before it reuses a block. `continuations(block)` returns the
    blocks of longer prefixes, which cannot be used without `block`, each after its predecessors;
    they are evicted before `block`.

    The free list is a stack that starts with the low ids on top. Memory of a KV block is committed
    when the block is first used, so reusing the block that was freed last keeps it in the CPU's
    caches and the resident size small.
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
        self._cached: OrderedDict[BlockId, None] = OrderedDict()
        self._references = [0] * end  # by block id; entries below `first` are not used
        self._kept = bytearray(end)
        self._on_evict = on_evict
        self._continuations = continuations

    @property
    def num_free(self) -> int:
        """The number of blocks that `take` can hand out: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """The number of cached blocks: without references, but with their content kept."""
        return len(self._cached)

    def references(self, block: BlockId) -> int:
        """Return the reference count of `block`."""
        return self._references[block]

    def take(self, count: int) -> list[BlockId]:
        """Return `count` blocks with one reference each; the caller has checked `num_free`."""
        assert 0 <= count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
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
                assert block in self._cached, f"block {block} is free"
                del self._cached[block]
            references[block] += 1

    def release(self, blocks: Iterable[BlockId]) -> None:
        """Remove a reference from each of `blocks`; blocks without references can be reused."""
        references = self._references
        for block in blocks:
            assert references[block] > 0, f"block {block} released twice"
            references[block] -= 1
            if references[block]:
                continue
            if self._kept[block]:
                self._cached[block] = None
            else:
                self._free.append(block)

    def keep(self, blocks: Iterable[BlockId]) -> None:
        """Cache `blocks`, which are in use, at their last release instead of freeing them."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is not in use"
            self._kept[block] = 1

    def drop(self, block: BlockId) -> None:
        """Discard the content of `block`: it becomes free as soon as it has no references."""
        self._kept[block] = 0
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def vacate(self, count: int, kept: Sequence[BlockId], go_on: Callable[[], bool]) -> bool:
        """Evict cached blocks, but none of `kept`, until `count` are free.

        Returns False if `go_on()` returned False before that; blocks evicted by then stay free.
        kept: the blocks of a prefix, in order; they become the most recently used ones.
        """
        idle = [block for block in reversed(kept) if block in self._cached]
        for block in idle:
            self._cached.move_to_end(block)
        while len(self._free) < count and len(self._cached) > len(idle):
            if not go_on():
                return False
            self._free.append(self._evict())
        return True

    def _evict(self) -> BlockId:
        """Evict the least recently used block or, if it has cached continuations, one of those."""
        for block in self._continuations(next(iter(self._cached))):
            if block in self._cached:
                self._cached.move_to_end(block, last=False)
        block, _ = self._cached.popitem(last=False)
        self._kept[block] = 0
        if self._on_evict is not None:
            self._on_evict(block)
        return block

    def check_invariants(self, uses: Iterable[BlockId]) -> None:
        """Raise AssertionError unless references equal `uses` (one entry per holder and block)."""
        wanted = [0] * len(self._references)
        for block in uses:
            wanted[block] += 1
        assert wanted == self._references, "reference counts differ from the block tables"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is twice in the free list"
        assert not free & self._cached.keys(), "a block is free and cached"
        idle = {i for i, count in enumerate(wanted) if not count and i >= self._first}
        assert free | self._cached.keys() == idle, "free list and reference counts disagree"
        assert all(self._kept[block] for block in self._cached), "a cached block is not kept"
        assert not any(self._kept[block] for block in free), "a kept block is in the free list"
