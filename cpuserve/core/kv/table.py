"""BlockTable: the blocks of a sequence in a cache group, and which entries the executor has."""

from __future__ import annotations

from collections.abc import Iterable

from cpuserve.base.ids import BlockId


class BlockTable(list[BlockId]):
    """A list of blocks that knows which entries changed since it was last sent to the executor.

    An executor stores the table of each sequence, and each step sends it the entries from `sent` on
    (runtime/pack.py). Blocks may therefore be appended as to any list,
    but other changes must use the methods of this class.
    """

    __slots__ = ("_left", "sent")

    def __init__(self, blocks: Iterable[BlockId] = ()) -> None:
        super().__init__(blocks)
        self.sent = 0  # how many of the first entries the executor has
        self._left = 0  # `leave` has replaced all entries before this index

    def put(self, index: int, block: BlockId) -> None:
        """Make `block` entry `index`: replace the entry there, or append one."""
        self[index] = block
        self.sent = min(self.sent, index)
        self._left = min(self._left, index)

    def leave(self, end: int, gone: BlockId) -> list[BlockId]:
        """Replace all entries before `end` by `gone`; return the blocks that they had."""
        begin = self._left
        if begin >= end:
            return []
        left = [block for block in self[begin:end] if block != gone]
        if left:
            self[begin:end] = [gone] * (end - begin)
            self.sent = min(self.sent, begin)
        self._left = end
        return left

    def cut(self, end: int) -> None:
        """Remove all entries from index `end` on."""
        del self[end:]
        self.sent = min(self.sent, end)
        self._left = min(self._left, end)
