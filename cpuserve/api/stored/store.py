"""Store: entries of clients in memory, with limits on their number, bytes and age.

An entry belongs to the caller that made it. For other callers it does not exist.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from cpuserve.config.server import ServerOptions
from cpuserve.errors import InvalidRequest, TooManyRequests

_DEFAULTS = ServerOptions()
# Estimates of the memory of the objects themselves, without their JSON.
_ENTRY_BYTES, _ITEM_BYTES, _REFERENCE_BYTES = 1024, 200, 16


@dataclass(frozen=True, slots=True)
class StoreBounds:
    """The most entries (0 = nothing is stored), their bytes together, and their age in seconds."""

    num_entries: int = _DEFAULTS.stored_responses
    num_bytes: int = _DEFAULTS.stored_bytes
    age_s: float = _DEFAULTS.stored_age

    @classmethod
    def of(cls, options: ServerOptions) -> StoreBounds:
        """Return the bounds that the options of the server set."""
        return cls(options.stored_responses, options.stored_bytes, options.stored_age)


@dataclass(slots=True, eq=False)
class StoredItem:
    """The JSON of one item of a conversation. Entries share items; users: how many hold it."""

    id: str
    data: bytes
    users: int = 0

    @property
    def size(self) -> int:
        """The bytes of memory that the item takes."""
        return len(self.data) + _ITEM_BYTES


@dataclass(slots=True, eq=False)
class Entry:
    """A response or a conversation; while it is `running` it stays stored.

    items: the items that it holds, which the Store changes.
    size: the bytes of everything else.
    """

    caller: str
    id: str
    items: list[StoredItem] = field(default_factory=list)
    size: int = _ENTRY_BYTES
    running: bool = False
    begun: float = 0.0

    @property
    def held(self) -> int:
        """The bytes of the entry with all its items."""
        return self.size + sum(item.size + _REFERENCE_BYTES for item in self.items)


E = TypeVar("E", bound=Entry)


class Store:
    """Holds entries. If a bound is exceeded, the oldest finished entry is dropped.

    It is dropped from the entries of the caller that holds most, so that a caller that stores much
    replaces its own entries.
    """

    def __init__(
        self, bounds: StoreBounds | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.bounds = bounds or StoreBounds()
        self.num_bytes = 0
        self._clock = clock
        self._entries: dict[tuple[str, str], Entry] = {}  # the oldest entry first
        self._items: dict[tuple[str, str], StoredItem] = {}

    @property
    def enabled(self) -> bool:
        """Whether anything can be stored."""
        return self.bounds.num_entries > 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, kind: type[E], caller: str, entry_id: str) -> E | None:
        """Return the caller's entry with this id; None if there is none, or none any more."""
        self._drop_old()
        found = self._entries.get((caller, entry_id))
        return found if isinstance(found, kind) else None

    def item(self, caller: str, item_id: str) -> StoredItem | None:
        """Return the newest item with this id among the caller's entries."""
        self._drop_old()
        return self._items.get((caller, item_id))

    def add(self, entry: Entry, items: Iterable[StoredItem] = ()) -> None:
        """Store an entry with its items.

        Raises:
          InvalidRequest: the entry alone is larger than the store.
          TooManyRequests: entries that are still running fill the store.
        """
        self._drop_old()
        if (known := self._entries.get((entry.caller, entry.id))) is not None:
            self.remove(known)
        entry.begun = self._clock()
        self._entries[entry.caller, entry.id] = entry
        self.num_bytes += entry.size
        try:
            self.grow(entry, items)
        except (InvalidRequest, TooManyRequests):
            self.remove(entry)
            raise

    def grow(self, entry: Entry, items: Iterable[StoredItem] = (), num_bytes: int = 0) -> None:
        """Add items and further bytes to a stored entry; it raises the errors of `add`."""
        added = list(items)
        for item in added:
            self._hold(entry, item)
        entry.items += added
        entry.size += num_bytes
        self.num_bytes += num_bytes
        if self._exceeded():
            try:
                self._make_room(entry)
            except (InvalidRequest, TooManyRequests):
                entry.size -= num_bytes
                self.num_bytes -= num_bytes
                self.drop_items(entry, added)
                raise

    def drop_items(self, entry: Entry, items: list[StoredItem]) -> None:
        """Remove these items from an entry."""
        for item in items:
            entry.items.remove(item)
            self._release(entry, item)

    def refresh(self, entry: Entry) -> None:
        """Make an entry the newest one."""
        self._entries[entry.caller, entry.id] = self._entries.pop((entry.caller, entry.id))
        entry.begun = self._clock()

    def remove(self, entry: Entry) -> None:
        """Remove an entry; nothing happens if it is not stored any more."""
        if self._entries.get((entry.caller, entry.id)) is not entry:
            return
        del self._entries[entry.caller, entry.id]
        self.num_bytes -= entry.size
        for item in entry.items:
            self._release(entry, item)

    def is_stored(self, entry: Entry) -> bool:
        """Return whether an entry is still stored."""
        return self._entries.get((entry.caller, entry.id)) is entry

    def _hold(self, entry: Entry, item: StoredItem) -> None:
        if item.users == 0:
            self.num_bytes += item.size
        item.users += 1
        self.num_bytes += _REFERENCE_BYTES
        self._items[entry.caller, item.id] = item

    def _release(self, entry: Entry, item: StoredItem) -> None:
        item.users -= 1
        self.num_bytes -= _REFERENCE_BYTES
        if item.users == 0:
            self.num_bytes -= item.size
            if self._items.get((entry.caller, item.id)) is item:
                del self._items[entry.caller, item.id]

    def _exceeded(self) -> bool:
        bounds = self.bounds
        return len(self._entries) > bounds.num_entries or self.num_bytes > bounds.num_bytes

    def _make_room(self, entry: Entry) -> None:
        """Drop finished entries until the bounds hold; `entry` stays."""
        running = [one for one in self._entries.values() if one.running or one is entry]
        bounds, most = self.bounds, self.bounds.num_bytes
        if entry.held > most:
            msg = (
                f"This would store {entry.held} bytes, and all that clients store here may take "
                f"{most} bytes: set store to false, or start the server with a larger "
                "--stored-bytes"
            )
            raise InvalidRequest(msg, param="store", code="store_full")
        if len(running) > bounds.num_entries or sum(one.held for one in running) > most:
            msg = (
                f"The store is full: it has {len(running) - 1} responses that are still running, "
                f"and may have {bounds.num_entries} entries with {most} bytes. Try again later, "
                "or set store to false"
            )
            raise TooManyRequests(msg)
        while self._exceeded() and (oldest := self._oldest_finished(entry)) is not None:
            self.remove(oldest)

    def _oldest_finished(self, keep: Entry) -> Entry | None:
        """Return the oldest finished entry of the caller that holds most; None if all run."""
        finished = [one for one in self._entries.values() if not one.running and one is not keep]
        shares: Counter[str] = Counter()
        for one in self._entries.values():
            shares[one.caller] += one.held
        return max(finished, key=lambda one: shares[one.caller], default=None)

    def _drop_old(self) -> None:
        """Drop the finished entries that are too old."""
        oldest = self._clock() - self.bounds.age_s
        expired = []
        for entry in self._entries.values():
            if entry.begun > oldest:
                break
            if not entry.running:
                expired.append(entry)
        for entry in expired:
            self.remove(entry)
