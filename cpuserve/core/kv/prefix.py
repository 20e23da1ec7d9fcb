"""Names of KV content: a full block is known by a hash of its tokens and all tokens before it.

The index from these hashes to blocks is not built yet: `KvManager.match_prefix` finds nothing.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NewType

from cpuserve.ids import BlockId

BlockHash = NewType("BlockHash", bytes)


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Full blocks that already hold the first `num_tokens` tokens of a sequence."""

    blocks: list[BlockId] = field(default_factory=list)
    num_tokens: int = 0


def chain_hashes(token_ids: Sequence[int], block_size: int, salt: bytes) -> list[BlockHash]:
    """The hash of each full block of `token_ids`, each over the hash before it.

    `salt` is where the chain starts: random per process, so that nobody can construct a collision,
    and different per tenant where tenants must not see each other's prefixes.
    """
    hashes: list[BlockHash] = []
    parent = salt
    for end in range(block_size, len(token_ids) + 1, block_size):
        content = array("i", token_ids[end - block_size : end]).tobytes()
        parent = hashlib.sha256(parent + content).digest()
        hashes.append(BlockHash(parent))
    return hashes
