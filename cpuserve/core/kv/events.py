"""Events about changes of the prefix cache, for routers outside of the server.

The events and their encoding as msgpack arrays follow vLLM (distributed/kv_events.py, v0.30), so
that llm-d, AIBrix and Dynamo can read them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Protocol

import msgspec

from cpuserve.core.media import extra_keys

# vLLM uses this name for the memory that the engine computes with, on CPUs as well.
# In vLLM "CPU" is a tier of offloaded blocks, which routers value less.
MEDIUM = "GPU"
_ID_BYTES = array("i").itemsize
ExtraKey = str | tuple[str, int]


class BlockStored(msgspec.Struct, array_like=True, tag=True):
    """The event that consecutive blocks of a text have been added to the cache.

    block_hashes: the keys of these blocks;
      each key depends on all tokens up to the end of its block.
    parent_block_hash: the key of the block before the first one; None = the text begins with it.
    token_ids: the tokens of all these blocks.
    extra_keys: the name of the adapter of each block, (digest, place in the block) of each item
      in it and, at the beginning of a text, its cache_salt; None for a block with none of these.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[ExtraKey, ...] | None] | None = None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True):
    """The event that these blocks have been removed from the cache."""

    block_hashes: list[bytes]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True):
    """The event that the cache is empty."""


class IndexEntry(Protocol):
    """An entry of the prefix index (prefix.py CachedBlock)."""

    @property
    def key(self) -> bytes: ...

    @property
    def content(self) -> bytes: ...

    @property
    def parent(self) -> IndexEntry | None: ...

    @property
    def salt(self) -> str: ...


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


class CacheEvents:
    """Collects the changes of a prefix index until `take` returns them.

    adapter_name: a function that returns the name of the LoRA adapter with a fingerprint.
    A salt of the index is the client's cache_salt, after the fingerprint of the adapter and "@"
    if there is one. The fingerprint ends with `SamplingParams.scale_key`.
    """

    def __init__(self, block_size: int, adapter_name: Callable[[str], str] = str) -> None:
        self._block_size = block_size
        self._adapter_name = adapter_name
        # The first event makes receivers clear their index,
        # because an engine that was restarted has lost its cache.
        self._events: list[CacheEvent] = [AllBlocksCleared()]
        self._last: IndexEntry | None = None  # the last entry, if the last event is BlockStored

    def stored(self, entry: IndexEntry) -> None:
        """Record that `entry` was added to the index."""
        fingerprint, _, salt = entry.salt.rpartition("@")
        adapter = self._adapter_name(fingerprint) if fingerprint else None
        keys: list[ExtraKey] = [] if adapter is None else [adapter]
        keys += extra_keys(entry.content, self._block_size)
        if salt and entry.parent is None:
            keys.append(salt)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockStored) and self._last is entry.parent is not None:
            event = last
        else:
            parent = None if entry.parent is None else entry.parent.key
            event = BlockStored([], parent, [], self._block_size, None, MEDIUM, adapter)
            self._events.append(event)
        event.block_hashes.append(entry.key)
        event.token_ids += array("i", entry.content[: _ID_BYTES * self._block_size])
        if keys or event.extra_keys is not None:
            if event.extra_keys is None:
                event.extra_keys = [None] * (len(event.block_hashes) - 1)
            event.extra_keys.append(tuple(keys) or None)
        self._last = entry

    def removed(self, entry: IndexEntry) -> None:
        """Record that `entry` was removed from the index."""
        last = self._events[-1] if self._events else None
        if not isinstance(last, BlockRemoved):
            last = BlockRemoved([], MEDIUM)
            self._events.append(last)
        last.block_hashes.append(entry.key)
        self._last = None

    def cleared(self) -> None:
        """Record that the index is empty, and drop the earlier events."""
        self._events = [AllBlocksCleared()]
        self._last = None

    def take(self) -> list[CacheEvent]:
        """Return the events since the last call, in their order."""
        events, self._events, self._last = self._events, [], None
        return events
