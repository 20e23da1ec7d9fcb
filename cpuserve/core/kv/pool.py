"""BlockPool: KV block ids with reference counts."""

from __future__ import annotations

from collections.abc import Iterable

from cpuserve.ids import BlockId


class BlockPool:
    """Owns the block ids 0 .. num_blocks - 1.

    The free list is a stack that starts with low ids on top: KV memory is committed by first touch,
    so reusing the block freed last keeps it warm and the resident size small.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = [BlockId(i) for i in range(num_blocks - 1, -1, -1)]
        self._references = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks nobody uses."""
        return len(self._free)

    def take(self, count: int) -> list[BlockId]:
        """`count` free blocks, one reference each. The caller has looked at `num_free`."""
        free = self._free
        assert 0 <= count <= len(free), f"{count} blocks wanted, {len(free)} free"
        taken = [free.pop() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: Iterable[BlockId]) -> None:
        """One more reference to each of `blocks`, which are in use."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is free"
            self._references[block] += 1

    def release(self, blocks: Iterable[BlockId]) -> None:
        """One reference less to each of `blocks`; those nobody uses any more become free."""
        references = self._references
        for block in blocks:
            assert references[block] > 0, f"block {block} released twice"
            references[block] -= 1
            if not references[block]:
                self._free.append(block)

    def check_invariants(self, uses: Iterable[BlockId]) -> None:
        """AssertionError unless the counts are exactly `uses` (one entry per holder and block)."""
        wanted = [0] * self.num_blocks
        for block in uses:
            wanted[block] += 1
        assert wanted == self._references, "reference counts differ from the block tables"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is twice in the free list"
        idle = {block for block, count in enumerate(wanted) if not count}
        assert free == idle, "free list and reference counts disagree"
