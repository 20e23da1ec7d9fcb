"""Store: entries of clients in memory, with limits on their number, total bytes and age.

An entry belongs to the caller that created it; other callers cannot see it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from cpuserve.base.errors import InvalidRequest, TooManyRequests
from cpuserve.config.server import ServerOptions
from cpuserve.serving.callers.holdings import Holdings

_DEFAULTS = ServerOptions()
# Estimated bytes of the Python objects of an entry, an item and a reference, without their JSON.
# A reference takes only 8 bytes, but time as well: to drop the million references of a store with
# the default size takes the event loop about 60 ms.
_ENTRY_BYTES, _ITEM_BYTES, _REFERENCE_BYTES = 1024, 200, 32


@dataclass(frozen=True, slots=True)
class StoreBounds:
    """Limits of the store: the number of entries (0 = none), their total bytes, their age in s."""

    num_entries: int = _DEFAULTS.stored_responses
    num_bytes: int = _DEFAULTS.stored_bytes
    age_s: float = _DEFAULTS.stored_age

    @classmethod
    def of(cls, options: ServerOptions) -> StoreBounds:
        """Return the limits that the server options set."""
        return cls(options.stored_responses, options.stored_bytes, options.stored_age)


@dataclass(slots=True, eq=False)
class StoredItem:
    """The JSON of one item of a conversation. users: the number of entries that share the item."""

    id: str
    data: bytes
    users: int = 0

    @property
    def size(self) -> int:
        """The bytes of memory that the item takes, including its Python objects."""
        return len(self.data) + _ITEM_BYTES


@dataclass(slots=True, eq=False)
class Entry:
    """A stored response or conversation; it is never dropped while `running` is true.

    items: the items of the entry; only the Store changes this list.
    size: the bytes of the entry without its items.
    item_bytes: the bytes of its items, including those that other entries share.
    """

    caller: str
    id: str
    items: list[StoredItem] = field(default_factory=list)
    size: int = _ENTRY_BYTES
    item_bytes: int = 0
    running: bool = False
    begun: float = 0.0

    @property
    def held(self) -> int:
        """The bytes of the entry, including all its items."""
        return self.size + self.item_bytes


E = TypeVar("E", bound=Entry)


class Store:
    """Stores entries in memory. If a limit is exceeded, the oldest finished entry is dropped.

    The dropped entry belongs to the caller that has stored the most (`Holdings`).
    """

    def __init__(
        self, bounds: StoreBounds | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.bounds = bounds or StoreBounds()
        self.num_bytes = 0
        self._clock = clock
        self._entries: dict[tuple[str, str], Entry] = {}  # in order of age, the oldest entry first
        self._items: dict[tuple[str, str], StoredItem] = {}

    @property
    def enabled(self) -> bool:
        """Whether the store accepts entries at all."""
        return self.bounds.num_entries > 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, kind: type[E], caller: str, entry_id: str) -> E | None:
        """Return the caller's entry of this kind with this id; None if there is none."""
        self.drop_old()
        found = self._entries.get((caller, entry_id))
        return found if isinstance(found, kind) else None

    def item(self, caller: str, item_id: str) -> StoredItem | None:
        """Return the newest item with this id in the caller's entries; None if there is none.

        Any thread may call this; `drop_old` forgets the items of old entries before.
        """
        return self._items.get((caller, item_id))

    def add(self, entry: Entry, items: Iterable[StoredItem] = ()) -> None:
        """Store an entry with its items.

        Raises:
          InvalidRequest: the entry alone is larger than the store.
          TooManyRequests: entries that are still running fill the store.
        """
        self.drop_old()
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
        """Add items and `num_bytes` bytes to a stored entry; for errors, see `add`."""
        added = list(items)
        self._hold(entry, added)
        entry.size += num_bytes
        self.num_bytes += num_bytes
        if self._exceeded():
            try:
                self._make_room(entry)
            except (InvalidRequest, TooManyRequests):
                entry.size -= num_bytes
                self.num_bytes -= num_bytes
                del entry.items[len(entry.items) - len(added) :]
                self._release(entry, added)
                raise

    def drop_item(self, entry: Entry, item: StoredItem) -> None:
        """Remove an item from a stored entry."""
        entry.items.remove(item)
        self._release(entry, [item])

    def refresh(self, entry: Entry) -> None:
        """Make an entry the newest entry, as if it had just been added."""
        self._entries[entry.caller, entry.id] = self._entries.pop((entry.caller, entry.id))
        entry.begun = self._clock()

    def drop_old(self) -> None:
        """Drop finished entries that exceed the maximum age."""
        oldest = self._clock() - self.bounds.age_s
        expired = []
        for entry in self._entries.values():
            if entry.begun > oldest:
                break
            if not entry.running:
                expired.append(entry)
        for entry in expired:
            self.remove(entry)

    def remove(self, entry: Entry) -> None:
        """Remove an entry; nothing happens if the entry is no longer stored."""
        if self._entries.get((entry.caller, entry.id)) is not entry:
            return
        del self._entries[entry.caller, entry.id]
        self.num_bytes -= entry.size
        self._release(entry, entry.items)

    def is_stored(self, entry: Entry) -> bool:
        """Return whether an entry is still stored."""
        return self._entries.get((entry.caller, entry.id)) is entry

    def _hold(self, entry: Entry, items: list[StoredItem]) -> None:
        """Append items to an entry, and count their bytes."""
        for item in items:
            entry.item_bytes += item.size
            if item.users == 0:
                self.num_bytes += item.size
            item.users += 1
            self._items[entry.caller, item.id] = item
        entry.items += items
        entry.item_bytes += _REFERENCE_BYTES * len(items)
        self.num_bytes += _REFERENCE_BYTES * len(items)

    def _release(self, entry: Entry, items: list[StoredItem]) -> None:
        """Forget items that are no longer in the list of an entry."""
        unused: list[StoredItem] = []
        num_bytes = 0
        for item in items:
            item.users = users = item.users - 1
            num_bytes += len(item.data)
            if not users:
                unused.append(item)
        entry.item_bytes -= num_bytes + (_ITEM_BYTES + _REFERENCE_BYTES) * len(items)
        self.num_bytes -= _REFERENCE_BYTES * len(items)
        for item in unused:
            self.num_bytes -= item.size
            if self._items.get((entry.caller, item.id)) is item:
                del self._items[entry.caller, item.id]

    def _exceeded(self) -> bool:
        bounds = self.bounds
        return len(self._entries) > bounds.num_entries or self.num_bytes > bounds.num_bytes

    def _make_room(self, entry: Entry) -> None:
        """Drop finished entries until the limits are met; `entry` itself is not dropped."""
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
        holdings = Holdings[Entry]()
        for one in self._entries.values():
            stays = one.running or one is entry
            holdings.add(one.caller, one.held, None if stays else one)
        while self._exceeded():
            dropped = holdings.drop(too_many_bytes=self.num_bytes > most)
            if dropped is None:
                return
            self.remove(dropped)
