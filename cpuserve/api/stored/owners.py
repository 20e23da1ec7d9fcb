"""Owners of files, batches and models on disk: a digest of an API key, or a client's address."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def owner_of(key: str) -> str:
    """Return the owner id of an API key; it does not depend on the place or number of the keys."""
    digest = hashlib.sha256(b"cpuserve owner\0" + key.encode()).hexdigest()
    return f"key-{digest[:32]}"


class Owners:
    """The owners that the API keys of a server stand for.

    Earlier versions stored the place of a key, "key-1" for the first, as the owner.
    """

    def __init__(self, keys: Sequence[str] = ()) -> None:
        """keys: the API keys in the order of the command line; empty = the server has none."""
        self.ids = tuple(dict.fromkeys(owner_of(key) for key in keys))
        self._by_place = {f"key-{1 + place}": owner_of(key) for place, key in enumerate(keys)}
        self._callers = {owner: place for place, owner in reversed(self._by_place.items())}

    def current(self, stored: str) -> str:
        """Return the owner of a record on disk: of a place, the key that has this place now."""
        return self._by_place.get(stored, stored)

    def caller(self, owner: str) -> str:
        """Return the name of an owner in logs and metrics: "key-1", or an address."""
        return self._callers.get(owner, owner)
