"""Quota: an amount that callers store on disk, reserved before it is written, with fair shares."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection

# Half of a quota belongs to the callers in equal shares, which nobody else can take. A server
# without API keys does not know its callers, and shares this half among as many.
_UNKNOWN_CALLERS = 8


class Quota:
    """How much of `limit` each caller holds, in bytes or in pieces; safe for several threads.

    With N API keys, each key can always have a share of limit / 2N; the other half is for whoever
    comes first. Without keys, callers are addresses, and one share of limit / 16 is kept
    for an address that stores nothing yet.
    """

    def __init__(self, limit: int, callers: Callable[[], Collection[str]] = tuple) -> None:
        """callers: returns the owner ids of all API keys; empty = the server has no keys.

        A reload of --api-key-file may change them.
        """
        self.limit = limit
        self.total = 0
        self._callers = callers
        self._held: Counter[str] = Counter()
        self._lock = threading.Lock()

    def room(self, caller: str) -> int:
        """Return how much more a caller may hold now; it may be negative."""
        with self._lock:
            return self._room(caller)

    def is_below_share(self, caller: str) -> bool:
        """Return whether a caller holds less than its share, which others took before it came."""
        with self._lock:
            return self._held[caller] < self._share

    def take(self, caller: str, amount: int) -> bool:
        """Reserve an amount for a caller; return False, without a change, if there is no room."""
        with self._lock:
            if amount > self._room(caller):
                return False
            self._add(caller, amount)
            return True

    def add(self, caller: str, amount: int) -> None:
        """Count an amount that is stored already, whatever the limit; negative = give it back."""
        with self._lock:
            self._add(caller, amount)

    @property
    def _share(self) -> int:
        return self.limit // (2 * (len(self._callers()) or _UNKNOWN_CALLERS))

    def _add(self, caller: str, amount: int) -> None:
        self.total += amount
        self._held[caller] += amount
        if self._held[caller] <= 0:
            del self._held[caller]

    def _room(self, caller: str) -> int:
        own = self._held[caller]
        others = self.total - own
        share = self._share
        most = max(min(share, self.limit - others), self.limit - others - self._kept(caller, share))
        return most - own

    def _kept(self, caller: str, share: int) -> int:
        """Return how much is kept for other callers, besides the amounts that they hold."""
        if known := self._callers():
            return sum(max(0, share - self._held[c]) for c in known if c != caller)
        return share
