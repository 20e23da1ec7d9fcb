"""BlockPool: KV block ids with reference counts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable
from itertools import islice

from cpuserve.ids import BlockId


class BlockPool:
    """Owns the block ids 0 .. num_blocks - 1.

    A block is in use (it has references), or cached (nobody uses it, but its content may be wanted
    again: see `keep`), or free. Cached blocks can be given out like free ones, the one unused for
    longest first, after `on_evict(block)`.

    The free list is a stack that starts with low ids on top: KV memory is committed as it is used,
    so reusing the block freed last keeps it warm and the resident size small.
    """

    def __init__(
        self, num_blocks: int, on_evict: Callable[[BlockId], object] | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self._free = [BlockId(i) for i in range(num_blocks - 1, -1, -1)]
        self._cached: OrderedDict[BlockId, None] = OrderedDict()
        self._references = [0] * num_blocks
        self._kept = bytearray(num_blocks)
        self._on_evict = on_evict

    @property
    def num_free(self) -> int:
        """Blocks that can be given out: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks nobody uses whose content is kept."""
        return len(self._cached)

    def references(self, block: BlockId) -> int:
        """How many hold `block`."""
        return self._references[block]

    def take(self, count: int) -> list[BlockId]:
        """`count` blocks, one reference each. The caller has looked at `num_free`."""
        assert 0 <= count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        free = self._free
        taken = [free.pop() if free else self._evict() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: Iterable[BlockId]) -> None:
        """One more reference to each of `blocks`, which are in use or cached."""
        references = self._references
        for block in blocks:
            if not references[block]:
                assert block in self._cached, f"block {block} is free"
                del self._cached[block]
            references[block] += 1

    def release(self, blocks: Iterable[BlockId]) -> None:
        """One reference less to each of `blocks`; those nobody uses any more can be given out."""
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

    def keep(self, block: BlockId) -> None:
        """`block`, which is in use, becomes cached and not free after its last release."""
        assert self._references[block] > 0, f"block {block} is not in use"
        self._kept[block] = 1

    def drop(self, block: BlockId) -> None:
        """The content of `block` is not wanted any more."""
        self._kept[block] = 0
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def vacate(self, count: int, kept: Container[BlockId], go_on: Callable[[], bool]) -> bool:
        """Evict cached blocks, but none of `kept`, until `count` are free; False if not `go_on()`.

        Those that have left by then stay free.
        """
        others = (block for block in self._cached if block not in kept)
        for block in list(islice(others, max(0, count - len(self._free)))):
            if not go_on():
                return False
            self._free.append(self._evict(block))
        return True

    def _evict(self, block: BlockId | None = None) -> BlockId:
        """Forget the content of `block`, or of the one unused for longest."""
        if block is None:
            block = next(iter(self._cached))
        del self._cached[block]
        self._kept[block] = 0
        if self._on_evict is not None:
            self._on_evict(block)
        return block

    def check_invariants(self, uses: Iterable[BlockId]) -> None:
        """AssertionError unless the counts are exactly `uses` (one entry per holder and block)."""
        wanted = [0] * self.num_blocks
        for block in uses:
            wanted[block] += 1
        assert wanted == self._references, "reference counts differ from the block tables"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is twice in the free list"
        assert not free & self._cached.keys(), "a block is free and cached"
        idle = {block for block, count in enumerate(wanted) if not count}
        assert free | self._cached.keys() == idle, "free list and reference counts disagree"
        assert all(self._kept[block] for block in self._cached), "a cached block is not kept"
        assert not any(self._kept[block] for block in free), "a kept block is in the free list"
