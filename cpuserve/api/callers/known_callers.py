"""KnownCallers: the API keys that a server accepts, their limits, and who owns stored things.

KeyFileWatch reads --api-key-file again when it changes, or when a signal asks for it.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from cpuserve.api.callers.key_file import digest_of, owner_of, read_key_file, state_of
from cpuserve.base.errors import ConfigError
from cpuserve.base.log import get_logger
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


# Kubernetes sends no signal when it replaces a mounted file.
PERIOD_S = 2.0


class KeyFileWatch:
    """Looks at the file every period_s seconds, and loads it when it has changed.

    A file that is not replaced, but written in place, may be incomplete at first. So a change
    is loaded when two looks have found the same file.
    """

    def __init__(self, callers: KnownCallers, period_s: float = PERIOD_S) -> None:
        """callers: they have a file."""
        assert callers.file is not None
        assert callers.loaded is not None
        self._callers = callers
        self._path = callers.file
        self._period_s = period_s
        self._settled: tuple[int, ...] | None = callers.loaded.state
        self._seen: tuple[int, ...] | None = self._settled
        self._refused: object = None
        self._asked = asyncio.Event()
        self.looks = 0

    def ask(self) -> None:
        """Load the file now, whether it has changed or not."""
        self._asked.set()

    async def run(self) -> None:
        """Watch the file until this task is cancelled."""
        while True:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._asked.wait(), self._period_s)
            if self._asked.is_set():
                self._asked.clear()
                self._refused = None
                await self._load(await asyncio.to_thread(self._state))
            else:
                await self._look()
            self.looks += 1

    async def _look(self) -> None:
        found = await asyncio.to_thread(self._state)
        same, self._seen = found == self._seen, found
        if same and found != self._settled:
            await self._load(found)

    def _named(self) -> set[str]:
        return {caller.name for caller in self._callers.named()}

    def _state(self) -> tuple[int, ...] | None:
        """Return the state of the file, or None if there is none. Links are followed."""
        try:
            return state_of(Path(self._path).expanduser().stat())
        except OSError:
            return None

    async def _load(self, found: tuple[int, ...] | None) -> None:
        """Load the file; if it cannot be used, log the error once and keep the earlier keys.

        Later looks try again: the reason may be the system's, such as too many open files.
        """
        self._seen = found
        before = self._named()
        try:
            read = await asyncio.to_thread(read_key_file, self._path)
            self._callers.load(read)
        except ConfigError as error:
            refused = found, str(error)
            if refused != self._refused:
                log.error("%s. The callers of the earlier file remain", error)
            self._refused = refused
            return
        self._refused = None
        self._settled = self._seen = read.state
        now = self._named()
        log.info(
            "--api-key-file %s was read again: %d callers, new %s, removed %s",
            self._path,
            len(now),
            _shown(now - before),
            _shown(before - now),
        )


def _shown(found: set[str]) -> str:
    return ", ".join(sorted(found)[:20]) + (", ..." if len(found) > 20 else "") or "none"
