"""Keys (hashes) of KV blocks, and the index from keys to blocks.

The key of a full block is a hash of its tokens and of all tokens before it. The placeholders of
all items of media are the same token, so the digest of the item is hashed as well.
The hash alone is not trusted: a hit also requires equal tokens and items in the block,
and that the parent of its entry is the entry that was found for the block before.
By induction the whole prefix is then equal,
so a hash collision cannot show a request the keys and values of other tokens.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NewType

import msgspec

from cpuserve.base.ids import BlockId
from cpuserve.core.kv.events import CacheEvents
from cpuserve.core.kv.table import BlockTable
from cpuserve.core.media import Placeholders

BlockHash = NewType("BlockHash", bytes)
Digest = Callable[[bytes], bytes]

FORGOTTEN = BlockId(-1)
NAMED_AT_ONCE = 64  # how many block keys one call computes, as each call has a fixed cost


def sha256(data: bytes) -> bytes:
    """Return the SHA-256 digest of `data`; block keys are made from it."""
    return hashlib.sha256(data).digest()


class CachedBlock(msgspec.Struct, eq=False):
    """An entry of the index: the tokens of a full block, their key, and the blocks with their KV.

    content: the ids of the tokens, and then the marks of the media items in the block (media.py).
    blocks: the KV block in each cache group, FORGOTTEN in a group where it was freed.
    children: the entries for blocks that follow this block.
    forgotten: whether the entry has been removed from the index.
    continued: whether the cached prefix of some sequence ended with this entry.
    """

    blocks: list[BlockId]
    key: BlockHash
    content: bytes
    parent: CachedBlock | None
    salt: str
    children: dict[CachedBlock, None] = {}
    forgotten: bool = False
    continued: bool = False

    @property
    def held(self) -> list[BlockId]:
        """The KV blocks that hold the keys and values of these tokens."""
        return [block for block in self.blocks if block != FORGOTTEN]


ChainMark = tuple[int, CachedBlock | None, int]


@dataclass(slots=True, eq=False)
class FoundPrefix:
    """The result of the last search for the prefix of a waiting sequence.

    entries: the entries of the first blocks of the sequence; each is the parent of the next entry.
    revivals: `PrefixIndex.revivals` at the time of the search.
    served: how many of these blocks every cache group has.
    served_of: the last entry, `revivals` and `PrefixIndex.alterations` when `served` was counted;
      `served` is counted again if one of them has changed.
    """

    entries: list[CachedBlock] = field(default_factory=list)
    revivals: int = 0
    served: int = 0
    served_of: tuple[CachedBlock | None, int, int] = (None, 0, 0)

    @property
    def last(self) -> CachedBlock | None:
        """The last entry, or None."""
        return self.entries[-1] if self.entries else None


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The cached blocks for the first `num_tokens` tokens of a sequence, and their entries.

    tables: the beginning of the block table of each cache group.
    blocks: the cached blocks in `tables`.
    branch: how many entries the index has for the beginning of the sequence.
      `entries` has fewer entries if a cache group has lost blocks.
    """

    entries: list[CachedBlock] = field(default_factory=list)
    num_tokens: int = 0
    tables: list[BlockTable] = field(default_factory=list)
    blocks: list[BlockId] = field(default_factory=list)
    branch: int = 0


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """The blocks begin .. end - 1 of a sequence, to be taken from the cache or an offload tier.

    tier: the slowest tier that one of these blocks is restored from.
    has_state: whether the states of recurrent layers
      at the end of the last block are restored from a tier as well.
    """

    begin: int
    end: int
    tier: str
    has_state: bool = False

    def kind(self, block: int) -> str:
        """Return the kind of a block for the cost model: its tier, and whether a state is restored.

        A state is far larger than a block, and all blocks of a kind should take the same time.
        """
        return f"{self.tier} state" if self.has_state and block == self.end - 1 else self.tier


@dataclass(slots=True, eq=False)
class PrefixChain:
    """The keys of the full blocks of one sequence, and the place of the sequence in the index.

    Each key is computed once. Sequences with a different `salt` share no blocks.
    The first `num_entries` blocks in the sequence's block table have entries in the index;
    `last` is the last of these entries, and `own` lists the entries that this sequence has created.

    placeholders: the placeholders of the media items in the prompt; None = there are none.
    snapshots: the indices of the blocks
      that keep the states of recurrent layers at their end for other sequences.
    found: the result of the last search, until the sequence adopts that prefix.
    plan: the blocks that are being restored.
      Until all of them are restored, a cache group may lack keys for the next token.
    failed: whether a tier had lost or damaged a block;
      no further block is then restored for this sequence.
    continues: whether the sequence is a turn of a conversation,
      so that its blocks stay in the cache longer (PublishedBlocks.judge).
    """

    salt: str = ""
    placeholders: Placeholders | None = None
    keys: list[BlockHash] = field(default_factory=list)
    contents: list[bytes] = field(default_factory=list)
    num_entries: int = 0
    last: CachedBlock | None = None
    own: list[CachedBlock] = field(default_factory=list)
    snapshots: frozenset[int] = frozenset()
    found: FoundPrefix = field(default_factory=FoundPrefix)
    plan: RestorePlan | None = None
    failed: bool = False
    continues: bool = False

    def reset(self) -> None:
        """Go back to the beginning after the sequence has lost its blocks; the keys stay valid."""
        self.num_entries, self.last, self.plan = 0, None, None
        self.own.clear()

    @property
    def mark(self) -> ChainMark:
        """The current position of the chain, for `return_to`."""
        return self.num_entries, self.last, len(self.own)

    def return_to(self, mark: ChainMark) -> list[CachedBlock]:
        """Go back to the position `mark`; return the entries that the chain has created since."""
        self.num_entries, self.last, count = mark
        made = self.own[count:]
        del self.own[count:]
        return made

    def advance(self, entry: CachedBlock) -> None:
        """Record that the next block of the sequence is the block of `entry`."""
        self.num_entries += 1
        self.last = entry
        if self.plan is not None and self.num_entries == self.plan.end:
            self.plan = None


class PrefixIndex:
    """Maps keys to blocks. Tests pass a weak `digest` to get collisions.

    The parent of every entry is in the index.
    A lookup starts at the beginning of a text, so it could never reach an entry without its parent,
    and this entry would prevent others from inserting the same tokens.

    seed: the bytes that hashes start from; random per process unless keys must outlive the process.
    revivals: how many evicted entries were inserted again, perhaps with another parent.
    alterations: how often an entry of the index lost or received the block of one cache group.
    events: records added and removed entries; None = nobody reads such events.
    """

    def __init__(
        self,
        block_size: int,
        digest: Digest = sha256,
        seed: bytes | None = None,
        events: CacheEvents | None = None,
    ) -> None:
        self._block_size = block_size
        self._digest = digest
        # The seed is secret, so that nobody can prepare prompts with colliding hashes.
        self._seed = seed or secrets.token_bytes(32)
        self._by_key: dict[BlockHash, CachedBlock] = {}
        self._by_block: dict[BlockId, CachedBlock] = {}
        self.revivals = 0
        self.alterations = 0
        self.events = events

    def __contains__(self, block: BlockId) -> bool:
        return block in self._by_block

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[CachedBlock]:
        return iter(self._by_key.values())

    def name(self, chain: PrefixChain, token_ids: Sequence[int], count: int) -> None:
        """Append the missing keys of the first `count` blocks of `token_ids` to `chain`."""
        size, keys = self._block_size, chain.keys
        begin = len(keys)
        if begin >= count:
            return
        tokens = array("i", token_ids[begin * size : count * size])
        parent: bytes = keys[-1] if keys else self._root(chain.salt)
        placeholders = chain.placeholders
        for at in range(0, len(tokens), size):
            content = tokens[at : at + size].tobytes()
            if placeholders is not None:
                first = begin * size + at
                content += placeholders.mark(first, first + size)
            parent = self._digest(parent + content)
            keys.append(BlockHash(parent))
            chain.contents.append(content)

    def _root(self, salt: str) -> bytes:
        return self._digest(self._seed + salt.encode("utf-8", "surrogatepass"))

    def find(
        self, chain: PrefixChain, index: int, parent: CachedBlock | None
    ) -> CachedBlock | None:
        """Return the entry of block `index` of `chain` if it has this parent; else None."""
        entry = self._by_key.get(chain.keys[index])
        if entry is None or entry.parent is not parent:
            return None
        same = entry.content == chain.contents[index] and entry.salt == chain.salt
        return entry if same else None

    def search(self, chain: PrefixChain, token_ids: Sequence[int], most: int) -> FoundPrefix:
        """Return the index entries of the first blocks of a sequence, at most `most` entries.

        The search continues where the last one ended,
        because every step searches for each waiting sequence. An entry is evicted only
        after its children, so the result is still valid if its last entry is in the index. An entry
        that was inserted again may have another parent: the search then starts from the beginning.
        """
        found = chain.found
        entries = found.entries
        if found.revivals != self.revivals:
            entries.clear()
            found.revivals = self.revivals
        if len(entries) > most or (entries and entries[-1].forgotten):
            del entries[bisect_left(entries, True, hi=min(most, len(entries)), key=_forgotten) :]
        entries += self.walk(chain, token_ids, len(entries), most, found.last)
        return found

    def walk(
        self,
        chain: PrefixChain,
        token_ids: Sequence[int],
        begin: int,
        most: int,
        parent: CachedBlock | None,
    ) -> list[CachedBlock]:
        """Return the entries of the blocks from `begin` to `most` - 1 that follow `parent`.

        A key is computed only when its block is looked up: the keys of 128k tokens take 5 ms.
        """
        entries: list[CachedBlock] = []
        for index in range(begin, most):
            if index >= len(chain.keys):
                self.name(chain, token_ids, min(index + NAMED_AT_ONCE, most))
            parent = self.find(chain, index, parent)
            if parent is None:
                break
            entries.append(parent)
        return entries

    def can_insert(self, chain: PrefixChain, blocks: Iterable[BlockId]) -> bool:
        """Whether `insert` would create an entry for `blocks`."""
        return not (
            _forgotten(chain.last)
            or any(map(self._by_block.__contains__, blocks))
            or chain.keys[chain.num_entries] in self._by_key
        )

    def insert(
        self, chain: PrefixChain, blocks: list[BlockId], old: CachedBlock | None = None
    ) -> CachedBlock | None:
        """Return the entry for the next block of `chain`: an existing entry, or a new one.

        Returns None if an entry is impossible: other content has the same hash,
        the parent's entry was evicted, or one of `blocks` belongs to another entry.

        old: an evicted entry of the same tokens.
        The old entry is used again, so that its children can be found again.
        """
        parent, index = chain.last, chain.num_entries
        if _forgotten(parent):
            return None
        key = chain.keys[index]
        if key in self._by_key:
            return self.find(chain, index, parent)
        if any(map(self._by_block.__contains__, blocks)):
            return None
        self.revivals += old is not None
        entry = old or CachedBlock([], key, chain.contents[index], parent, chain.salt)
        entry.blocks, entry.parent, entry.forgotten = blocks, parent, False
        if parent is not None:
            parent.children[entry] = None
        self._by_key[key] = entry
        for block in blocks:
            if block != FORGOTTEN:
                self._by_block[block] = entry
        if self.events is not None:
            self.events.stored(entry)
        return entry

    def fill(self, entry: CachedBlock, group: int, block: BlockId) -> bool:
        """Add `block` to `entry` in `group`; False if `block` belongs to another entry."""
        if block in self._by_block:
            return False
        entry.blocks[group] = block
        self._by_block[block] = entry
        self.alterations += 1
        return True

    def empty(self, entry: CachedBlock, group: int) -> None:
        """Remove the block in `group` from `entry`, which stays in the index without this block."""
        del self._by_block[entry.blocks[group]]
        entry.blocks[group] = FORGOTTEN
        self.alterations += 1

    def entry(self, block: BlockId) -> CachedBlock | None:
        """Return the entry of `block`, or None."""
        return self._by_block.get(block)

    def continuations(self, entry: CachedBlock) -> list[CachedBlock]:
        """Return all descendants of `entry`, each after its parent."""
        found = list(entry.children)
        for child in found:  # the list of descendants grows during the loop
            found += child.children
        return found

    def forget(self, entry: CachedBlock) -> list[BlockId]:
        """Remove `entry`, which must have no children, from the index, and return its blocks."""
        assert not entry.children, "an entry is removed before its children"
        held = entry.held
        for block in held:
            del self._by_block[block]
        del self._by_key[entry.key]
        if entry.parent is not None:
            del entry.parent.children[entry]
        entry.blocks = [FORGOTTEN] * len(entry.blocks)
        entry.forgotten = True
        if self.events is not None:
            self.events.removed(entry)
        return held

    def check_invariants(self) -> None:
        """Raise AssertionError unless both maps and the parent links agree."""
        held = sorted((b, id(e)) for e in self._by_key.values() for b in e.held)
        assert held == sorted((block, id(entry)) for block, entry in self._by_block.items()), (
            "the two maps of the index differ"
        )
        for key, entry in self._by_key.items():
            assert entry.key == key, "an entry has another key"
            assert not entry.forgotten, "a forgotten entry is in the index"
            assert entry.held or entry.children, "an entry leads to no block"
            assert not _forgotten(entry.parent), "an entry's parent was forgotten before it"
            if entry.parent is not None:
                assert entry in entry.parent.children, "an entry is not among its parent's children"
            assert all(child.parent is entry for child in entry.children), (
                "a child has another parent"
            )


def _forgotten(entry: CachedBlock | None) -> bool:
    return entry is not None and entry.forgotten
