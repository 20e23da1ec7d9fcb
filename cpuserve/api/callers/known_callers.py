"""KnownCallers: the API keys that a server accepts, their limits, and who owns stored things."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from cpuserve.api.callers.key_file import digest_of, owner_of, read_key_file
from cpuserve.errors import ConfigError
from cpuserve.log import get_logger
from cpuserve.serving.callers.caller import Caller, CallerUse

if TYPE_CHECKING:
    from cpuserve.api.callers.key_file import KeyFile, KeyFileEntry
    from cpuserve.config.server import ServerOptions

log = get_logger("serve")

# How many callers that are no longer in the file keep their limits, for the batches that they left.
_MOST_FORMER = 1000


@dataclass(frozen=True, slots=True)
class _Known:
    """A key that is accepted, by its SHA-256, and its caller."""

    digest: bytes = field(repr=False)
    caller: Caller


class KnownCallers:
    """Who may send requests: the keys of --api-key, and the callers in --api-key-file.

    A key of --api-key is the caller "key-1", "key-2" and so on, by its place, and owns things under
    an id that does not depend on its place. A caller in the file owns things under its name.
    Without keys, everyone may send requests, and the callers are addresses.
    """

    def __init__(
        self,
        keys: Sequence[str] = (),
        file: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """keys: the values of --api-key, in their order. file: the path in --api-key-file.

        clock: the seconds that limits a minute count.

        Raises:
          ConfigError: the file cannot be used.
        """
        self.file = file
        self._clock = clock
        self._given = [
            _Known(digest_of(key.encode()), Caller(f"key-{place}", owner_of(key)))
            for place, key in enumerate(keys, 1)
        ]
        # Earlier versions stored the place of a key, "key-1" for the first, as the owner.
        self._places = {f"key-{place}": owner_of(key) for place, key in enumerate(keys, 1)}
        self._known: list[_Known] = []
        self._former: dict[str, str] = {}
        self._by_owner: dict[str, Caller] = {}
        self._ids: tuple[str, ...] = ()
        self.loaded: KeyFile | None = None
        if file is None:
            self._set([])
        else:
            self.load(read_key_file(file))

    @classmethod
    def of(cls, options: ServerOptions) -> KnownCallers:
        """Return the callers that options set; ConfigError if their file cannot be used."""
        return cls(options.api_key, options.api_key_file)

    @property
    def have_keys(self) -> bool:
        """Whether requests need a key."""
        return bool(self._known)

    def find(self, key: bytes) -> Caller | None:
        """Return the caller with this key; None if there is none."""
        # The time of this comparison does not depend on the key: all digests have the same length,
        # and the digest of the key is compared with all of them.
        digest = digest_of(key)
        matches = [hmac.compare_digest(digest, known.digest) for known in self._known]
        return self._known[matches.index(True)].caller if any(matches) else None

    def load(self, read: KeyFile) -> None:
        """Accept the keys that were read from the file, and no longer the keys of earlier loads.

        The use of a caller is still counted, and requests that run keep their limits.

        Raises:
          ConfigError: a key is one of --api-key as well; nothing has changed.
        """
        given = {known.digest for known in self._given}
        for entry in read.entries:
            if not given.isdisjoint(entry.digests):
                msg = (
                    f"--api-key-file {self.file}: line {entry.line}: a key is one of --api-key "
                    "(CPUSERVE_API_KEY) as well: remove it there"
                )
                raise ConfigError(msg)
        if read.is_public and (self.loaded is None or not self.loaded.is_public):
            log.warning(
                "--api-key-file %s can be read by every user of this machine: chmod o-r, or write "
                "hashes of the keys (sha256:...)",
                self.file,
            )
        self._set(read.entries)
        self.loaded = read

    def _set(self, entries: Iterable[KeyFileEntry]) -> None:
        known, former = list(self._given), dict(self._places)
        for entry in entries:
            caller = self._caller(entry)
            known += [_Known(digest, caller) for digest in entry.digests]
            former |= dict.fromkeys(entry.former, caller.owner)
        self._known, self._former = known, former
        current = {each.caller.owner: each.caller for each in reversed(known)}
        earlier = {o: c for o, c in self._by_owner.items() if o not in current}
        kept = list(earlier.items())[-_MOST_FORMER:]
        self._by_owner = {**dict(kept), **current}
        self._ids = tuple(dict.fromkeys(each.caller.owner for each in known))

    def _caller(self, entry: KeyFileEntry) -> Caller:
        owner = f"caller-{entry.name}"
        before = self._by_owner.get(owner)
        use = CallerUse(self._clock) if before is None or before.use is None else before.use
        made = Caller(entry.name, owner, use=use)
        return replace(
            made,
            priority=entry.priority,
            private_cache=entry.private_cache,
            limits=entry.limits,
        )

    def named(self) -> list[Caller]:
        """Return the callers in the file."""
        given = {known.caller.owner for known in self._given}
        return [self._by_owner[owner] for owner in self._ids if owner not in given]

    @property
    def owners(self) -> tuple[str, ...]:
        """The owners that have shares of stored things; empty = the server has no keys."""
        return self._ids

    def current_owner(self, stored: str) -> str:
        """Return the owner of a record on disk, which may have the place or the id of a key.

        Things of a key that has a name now belong to this name.
        """
        owner = self._former.get(stored, stored)
        return self._former.get(owner, owner)

    def of_owner(self, owner: str) -> Caller:
        """Return the caller of a stored thing; one that is not known now has no limits."""
        return self._by_owner.get(owner) or Caller.of_address(owner)
