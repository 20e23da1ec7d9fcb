"""Holdings: the entries that a full store drops, so that no caller pushes out what others keep."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Holdings(Generic[T]):
    """The entries of callers in a store with limits on their number and their bytes.

    The oldest entry of the caller with the most goes first: with the most bytes if there are too
    many bytes, and with the most entries if there are too many entries. So a caller that stores
    much, of either kind, replaces its own entries.
    """

    def __init__(self) -> None:
        self._num_bytes: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._entries: dict[str, deque[tuple[int, T]]] = {}
        self._heaps: dict[bool, list[tuple[int, int, str]]] = {}

    def add(self, caller: str, num_bytes: int, entry: T | None) -> None:
        """Count an entry of a caller, the newest so far.

        num_bytes: its size. entry: what `drop` returns for it; None = it is never dropped.
        """
        self._num_bytes[caller] += num_bytes
        self._counts[caller] += 1
        if entry is not None:
            self._entries.setdefault(caller, deque()).append((num_bytes, entry))

    def drop(self, *, too_many_bytes: bool) -> T | None:
        """Return the entry that goes next, which is no longer counted; None = all others stay.

        too_many_bytes: whether the store has too many bytes, and not only too many entries.
        """
        held = self._num_bytes if too_many_bytes else self._counts
        heap = self._heaps.get(too_many_bytes)
        if heap is None:  # with equal amounts, the caller with the oldest entry comes first
            heap = [(-held[caller], place, caller) for place, caller in enumerate(self._entries)]
            heapq.heapify(heap)
            self._heaps[too_many_bytes] = heap
        while heap:
            amount, place, caller = heapq.heappop(heap)
            entries = self._entries[caller]
            if not entries:
                continue
            if held[caller] != -amount:  # entries went by the other amount meanwhile
                heapq.heappush(heap, (-held[caller], place, caller))
                continue
            num_bytes, entry = entries.popleft()
            self._num_bytes[caller] -= num_bytes
            self._counts[caller] -= 1
            heapq.heappush(heap, (-held[caller], place, caller))
            return entry
        return None
