"""Names of KV content, and the index from names to the blocks that hold it.

A full block is known by a hash of its tokens and of all tokens before it. The hash only finds an
entry: a hit also compares the block's own tokens and that the entry's parent is the entry the walk
came from, so by induction the whole prefix is equal and no collision can share wrong keys.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NewType

from cpuserve.ids import BlockId

BlockHash = NewType("BlockHash", bytes)
Digest = Callable[[bytes], bytes]

FORGOTTEN = BlockId(-1)


def sha256(data: bytes) -> bytes:
    """The digest that names blocks."""
    return hashlib.sha256(data).digest()


@dataclass(slots=True, eq=False)
class CachedBlock:
    """A block whose content has a name; `block` is FORGOTTEN once it has been evicted."""

    block: BlockId
    key: BlockHash
    content: bytes
    parent: CachedBlock | None
    salt: str


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Entries that already hold the first `num_tokens` tokens of a sequence."""

    entries: list[CachedBlock] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def blocks(self) -> list[BlockId]:
        """The blocks, in order."""
        return [entry.block for entry in self.entries]


@dataclass(slots=True, eq=False)
class PrefixChain:
    """The names of one sequence's full blocks, made as its tokens come and never twice.

    Sequences with different `salt` share nothing. The first `num_entries` blocks of the sequence's
    table are those of entries in the index; `last` is the last of these, `own` are those that it
    has made.
    """

    salt: str = ""
    keys: list[BlockHash] = field(default_factory=list)
    contents: list[bytes] = field(default_factory=list)
    num_entries: int = 0
    last: CachedBlock | None = None
    own: list[CachedBlock] = field(default_factory=list)

    def reset(self) -> None:
        """The sequence has lost its blocks; its names stay."""
        self.num_entries, self.last = 0, None
        self.own.clear()

    def advance(self, entry: CachedBlock) -> None:
        """The next block of the sequence is that of `entry`."""
        self.num_entries += 1
        self.last = entry


class PrefixIndex:
    """Which block holds which prefix. `digest` is for tests that want collisions.

    seed: what hashes start from; random per process unless names must outlive it.
    """

    def __init__(self, block_size: int, digest: Digest = sha256, seed: bytes | None = None) -> None:
        self._block_size = block_size
        self._digest = digest
        # Nobody else knows it, so that nobody can prepare prompts whose names collide.
        self._seed = seed or secrets.token_bytes(32)
        self._by_key: dict[BlockHash, CachedBlock] = {}
        self._by_block: dict[BlockId, CachedBlock] = {}

    def __contains__(self, block: BlockId) -> bool:
        return block in self._by_block

    def __len__(self) -> int:
        return len(self._by_block)

    def name(self, chain: PrefixChain, token_ids: Sequence[int], count: int) -> None:
        """Make the names of the first `count` blocks of `token_ids` that `chain` lacks."""
        size, keys = self._block_size, chain.keys
        parent: bytes = keys[-1] if keys else self._root(chain.salt)
        for index in range(len(keys), count):
            content = array("i", token_ids[index * size : (index + 1) * size]).tobytes()
            parent = self._digest(parent + content)
            keys.append(BlockHash(parent))
            chain.contents.append(content)

    def _root(self, salt: str) -> bytes:
        return self._digest(self._seed + salt.encode("utf-8", "surrogatepass"))

    def find(
        self, chain: PrefixChain, index: int, parent: CachedBlock | None
    ) -> CachedBlock | None:
        """The entry of block `index` of `chain` after `parent`, if it is there."""
        entry = self._by_key.get(chain.keys[index])
        if entry is None or entry.parent is not parent:
            return None
        same = entry.content == chain.contents[index] and entry.salt == chain.salt
        return entry if same else None

    def walk(self, chain: PrefixChain, most: int) -> list[CachedBlock]:
        """Entries of the first blocks of `chain`, up to `most`; their names must be made."""
        entries: list[CachedBlock] = []
        parent: CachedBlock | None = None
        for index in range(most):
            parent = self.find(chain, index, parent)
            if parent is None:
                break
            entries.append(parent)
        return entries

    def can_insert(self, chain: PrefixChain, block: BlockId) -> bool:
        """`insert` would name `block`."""
        parent = chain.last
        orphan = parent is not None and parent.block == FORGOTTEN
        return not (
            orphan or block in self._by_block or chain.keys[chain.num_entries] in self._by_key
        )

    def insert(
        self, chain: PrefixChain, block: BlockId, old: CachedBlock | None = None
    ) -> CachedBlock | None:
        """The entry for the next block of `chain`: a new one of `block`, or one that was there.

        None if the block cannot be named: other content has its hash, or its parent is forgotten.
        old: a forgotten entry of the same tokens to use for it, so that those after it find it.
        """
        parent, index = chain.last, chain.num_entries
        if parent is not None and parent.block == FORGOTTEN:
            return None
        key = chain.keys[index]
        known = self._by_key.get(key)
        if known is not None:
            orphan = known.parent is not None and known.parent.block == FORGOTTEN
            if not orphan:
                return self.find(chain, index, parent)
            return None  # nothing can find it any more; it is evicted in its time
        if block in self._by_block:
            return None
        entry = old or CachedBlock(block, key, chain.contents[index], parent, chain.salt)
        entry.block, entry.parent = block, parent
        self._by_key[key] = self._by_block[block] = entry
        return entry

    def entry(self, block: BlockId) -> CachedBlock | None:
        """The entry of `block`, if it has one."""
        return self._by_block.get(block)

    def forget(self, entry: CachedBlock) -> None:
        """Drop `entry`, which is in the index."""
        del self._by_block[entry.block]
        del self._by_key[entry.key]
        entry.block = FORGOTTEN

    def check_invariants(self) -> None:
        """AssertionError unless both directions agree."""
        entries: Iterable[CachedBlock] = self._by_block.values()
        assert set(map(id, entries)) == set(map(id, self._by_key.values())), "index is torn"
        for block, entry in self._by_block.items():
            assert entry.block == block, "an entry has another block"
            assert self._by_key[entry.key] is entry, "an entry has another key"
