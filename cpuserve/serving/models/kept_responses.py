"""KeptResponses: the tokens of prompts and responses in files, which survive a restart.

The blocks of a conversation are in the prefix cache on disk, under the tokens that the model wrote.
A tokenizer makes other tokens of the text that the client sends back, so without these files the
first turn after a restart would find the blocks only up to the first response.

FOLDER/responses/WHO-LENGTH-TEXT.ids   the tokens of a prompt and of its response.
FOLDER is the folder of the prefix cache (core/kv/cache_folder.py), and the seed there is the key of
all digests: WHO is a digest of the caller, then one of the model's files, the caller and the scope,
LENGTH the number of characters of the rendered prompt, and TEXT a digest of WHO and of these
characters. So a list of the files is the index, and only a prompt that begins with exactly this
text finds the file. If there are too many, the caller with the most loses its own first (Holdings).

A file is written under a temporary name and then renamed, and its beginning is a digest of the
rest. If it is damaged, or the disk fails, the response gets the tokens of its text, as if there was
no file. Several servers may use one folder, and find each other's files.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import re
import secrets
import threading
import time
from collections import deque
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cpuserve.base.background import keep
from cpuserve.base.fault_points import fault
from cpuserve.base.log import get_logger
from cpuserve.core.kv.block_file import SEED_BYTES
from cpuserve.core.kv.cache_folder import claim
from cpuserve.core.media import MediaItem
from cpuserve.core.regular_file import read_regular
from cpuserve.core.secret_file import read_secret
from cpuserve.serving.callers.holdings import Holdings
from cpuserve.serving.models.recent_prompts import PromptShape, RecentPrompt, Scope
from cpuserve.serving.threads import run_sized

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

# The most bytes and files of all models; a prompt of 16,000 tokens takes 64 KB.
MAX_BYTES, MAX_FILES = 1 << 26, 1024
# The most bytes of responses that wait to be written; further ones are not kept.
MAX_WAITING_BYTES = 1 << 25
# Fewer tokens than this are computed again: a block has 32 tokens.
LEAST_TOKENS = 64
# After writing 1/16 of the limits, a server looks for files of other servers, and removes old ones.
_TRIMS = 16
# Seconds until the folder is looked at again for files of other servers.
_LOOK_S = 0.5
# How many seconds the end of the server waits for the last files.
_CLOSE_S = 2.0
# An older temporary file was left by a server that has ended.
_STALE_S = 3600.0
# Reading a file may take milliseconds, so another thread does it (run_sized).
_READ_US = 5000
_NAME = re.compile(r"([0-9a-f]{16}-[0-9a-f]{32})-([0-9a-f]{1,8})-([0-9a-f]{32})\.ids")
_CALLER_CHARS = 16  # of WHO
_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.tmp")
_MAGIC = b"cpusids2"
_SUM_BYTES = 16

log = get_logger("serve")


class _Record(msgspec.Struct, array_like=True, frozen=True):
    """The content of a file, with members of RecentPrompt."""

    ids: bytes
    num_prompt: int
    opening: str
    thinks: bool
    continues: bool
    media: list[MediaItem]


class KeptResponses:
    """The prompts and responses of one model in the folder of its prefix cache. Thread-safe.

    found: how many prompts were found in files.
    """

    def __init__(self, directory: Path, model: bytes, most_bytes: int) -> None:
        """directory: the directory of the prefix cache. model: equal for models with equal tokens.

        Raises:
          OSError: the directory cannot be used.
          ConfigError: the folder there belongs to another program.
        """
        self.found = 0
        self._directory, self._model = directory, model
        self._most_bytes = min(most_bytes, MAX_BYTES)
        self._seed = b""
        self._folder = self._open()
        # The (length, digest) of each text, by WHO. _lock protects it.
        self._index: dict[str, set[tuple[int, str]]] = {}
        self._lock = threading.Lock()
        self._changed, self._next_look = -1, 0.0
        self._written = self._num_written = 0  # since the last _trim
        self._waiting: deque[tuple[int, RecentPrompt]] = deque()  # each with its bytes
        self._waiting_bytes = 0
        self._writer: asyncio.Task[None] | None = None
        self._failed = self._broken = False
        self._trim()

    def _open(self) -> Path:
        """Return the folder, which is made if it is missing; read the key of the digests."""
        root = claim(self._directory)
        lost = "the blocks cached with it cannot be found any more and are computed again"
        self._seed = read_secret(root / "seed", SEED_BYTES, lost, self._seed)
        folder = root / "responses"
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    # --- reading ------------------------------------------------------------------------------

    async def beginning(
        self,
        caller: str,
        scope: Scope,
        text: str,
        digests: Sequence[bytes] = (),
        longer_than: int = 0,
    ) -> RecentPrompt | None:
        """Return the kept prompt with the longest text that is a proper prefix of `text`, or None.

        The arguments are as in RecentPrompts.beginning. longer_than: the length found in memory.
        """
        who = self._who(caller, scope)
        if time.monotonic() < self._next_look and not self._known(who, longer_than, len(text)):
            return None
        found = await run_sized(_READ_US, lambda: self._find(who, text, digests, longer_than))
        if found is None:
            return None
        length, record = found
        self.found += 1
        return RecentPrompt(
            caller,
            scope,
            text[:length],
            record.ids,
            PromptShape(),
            record.opening,
            record.thinks,
            record.continues,
            record.num_prompt,
            media=record.media,
        )

    def _find(
        self, who: str, text: str, digests: Sequence[bytes], longer_than: int
    ) -> tuple[int, _Record] | None:
        self._look()
        known = self._known(who, longer_than, len(text))
        for length, digest in reversed([*self._equal(who, text, known)]):
            record = self._read(who, length, digest)
            if record is not None:
                own = [item.digest for item in record.media]
                if own == list(digests[: len(own)]):
                    return length, record
        return None

    def _known(self, who: str, longer_than: int, shorter_than: int) -> list[tuple[int, str]]:
        """Return (length, digest) of each kept text of WHO with a length between these."""
        with self._lock:
            return [
                each for each in self._index.get(who, ()) if longer_than < each[0] < shorter_than
            ]

    def _equal(
        self, who: str, text: str, known: Iterable[tuple[int, str]]
    ) -> Iterator[tuple[int, str]]:
        """Yield the texts in `known` that `text` begins with, the shortest one first."""
        digest, begin = self._digest(who.encode()), 0
        for length, same in groupby(sorted(known), key=lambda each: each[0]):
            digest.update(text[begin:length].encode("utf-8", "surrogatepass"))
            begin = length
            wanted = digest.hexdigest()
            if (length, wanted) in same:
                yield length, wanted

    def _read(self, who: str, length: int, digest: str) -> _Record | None:
        """Return the content of a file; None if it is missing or damaged."""
        path = self._path(who, length, digest)
        try:
            fault("response.read")
            raw = read_regular(path, MAX_BYTES) or b""
        except OSError as error:
            log.debug("%s cannot be read: %s", path, error)
            self._forget(who, length, digest)
            return None
        head, body = raw[: len(_MAGIC) + _SUM_BYTES], raw[len(_MAGIC) + _SUM_BYTES :]
        if hmac.compare_digest(head, _MAGIC + self._sum(path.name, body)):
            with suppress(OSError):
                os.utime(path)  # files that nobody uses are removed first
            return msgspec.msgpack.decode(body, type=_Record)
        if not self._broken:
            self._broken = True
            log.warning(
                "%s in the prefix cache is torn (incomplete) or damaged; it is removed, and its "
                "response gets the tokens of its text; further ones are removed silently",
                path,
            )
        with suppress(OSError):
            path.unlink()
        self._forget(who, length, digest)
        return None

    def _look(self) -> None:
        """Read the list of files again if it has changed, at most every _LOOK_S."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_S
        try:
            fault("response.list")
            changed = self._folder.stat().st_mtime_ns
            if changed == self._changed:
                return
            index: dict[str, set[tuple[int, str]]] = {}
            for path in self._folder.iterdir():
                if (match := _NAME.fullmatch(path.name)) is not None:
                    who, length, digest = match.groups()
                    index.setdefault(who, set()).add((int(length, 16), digest))
        except OSError as error:
            log.debug("%s cannot be read: %s", self._folder, error)
            return
        with self._lock:
            self._index, self._changed = index, changed

    def _forget(self, who: str, length: int, digest: str) -> None:
        with self._lock:
            self._index.get(who, set()).discard((length, digest))

    # --- writing ------------------------------------------------------------------------------

    def put(self, made: RecentPrompt) -> None:
        """Write a prompt with its response soon, from the event loop of this thread."""
        size = made.num_bytes
        if not made.shape.chat or len(made.ids) < LEAST_TOKENS * 4:
            return
        if self._waiting_bytes + size > MAX_WAITING_BYTES:
            return
        self._waiting.append((size, made))
        self._waiting_bytes += size
        if self._writer is None or self._writer.done():
            self._writer = keep("keeping responses", self._write_all)

    async def close(self) -> None:
        """Wait until the responses are written, at most _CLOSE_S."""
        if self._writer is not None:
            await asyncio.wait((self._writer,), timeout=_CLOSE_S)

    async def _write_all(self) -> None:
        while self._waiting:
            size, made = self._waiting.popleft()
            self._waiting_bytes -= size
            await asyncio.to_thread(self._write, made)

    def _write(self, made: RecentPrompt) -> None:
        who = self._who(made.caller, made.scope)
        text = self._digest(who.encode())
        text.update(made.text.encode("utf-8", "surrogatepass"))
        path = self._path(who, len(made.text), text.hexdigest())
        body = msgspec.msgpack.encode(
            _Record(
                made.ids,
                made.num_prompt,
                made.opening,
                made.thinks,
                made.continues,
                list(made.media),
            )
        )
        if len(body) > self._most_bytes:
            return  # all others would be removed for it
        try:
            self._store(path, _MAGIC + self._sum(path.name, body) + body)
        except OSError as error:
            if not self._failed:
                log.warning(
                    "the tokens of a response cannot be kept in %s (%s), so its conversation "
                    "computes more after a restart; the next failures are silent",
                    self._folder,
                    error.strerror or type(error).__name__,
                )
            self._failed = True
            return
        self._failed = False
        with self._lock:
            self._index.setdefault(who, set()).add((len(made.text), text.hexdigest()))
        self._written += len(body)
        self._num_written += 1
        if self._written * _TRIMS > self._most_bytes or self._num_written * _TRIMS > MAX_FILES:
            self._trim()

    def _store(self, path: Path, data: bytes) -> None:
        temporary = self._folder / f".{secrets.token_hex(8)}.tmp"
        fault("response.write")
        try:
            file = _created(temporary)
        except FileNotFoundError:  # a user has emptied the directory to clear the cache
            self._open()
            file = _created(temporary)
        try:
            with os.fdopen(file, "wb") as opened:
                opened.write(data)
            temporary.replace(path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise

    def _trim(self) -> None:
        """Remove files beyond the limits, those used least recently first, and what others left."""
        self._written = self._num_written = 0
        found: list[tuple[int, int, Path]] = []
        with suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                with suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if _NAME.fullmatch(entry.name):
                        found.append((status.st_mtime_ns, status.st_size, Path(entry.path)))
                    elif _TEMPORARY.fullmatch(entry.name) and _is_stale(status.st_mtime):
                        Path(entry.path).unlink()
        num_bytes, count = sum(size for _, size, _ in found), len(found)
        holdings = Holdings[tuple[int, Path]]()
        for _, size, path in sorted(found):
            holdings.add(path.name[:_CALLER_CHARS], size, (size, path))
        while num_bytes > self._most_bytes or count > MAX_FILES:
            dropped = holdings.drop(too_many_bytes=num_bytes > self._most_bytes)
            if dropped is None:
                return
            size, path = dropped
            with suppress(OSError):
                path.unlink()
            num_bytes, count = num_bytes - size, count - 1

    # --- digests ------------------------------------------------------------------------------

    def _digest(self, data: bytes) -> hashlib.blake2b:
        return hashlib.blake2b(data, digest_size=_SUM_BYTES, key=self._seed, person=b"responses")

    def _who(self, caller: str, scope: Scope) -> str:
        own = self._digest(caller.encode("utf-8", "surrogatepass")).hexdigest()[:_CALLER_CHARS]
        all_ = self._digest(msgspec.msgpack.encode([self._model, caller, *scope])).hexdigest()
        return f"{own}-{all_}"

    def _sum(self, name: str, body: bytes) -> bytes:
        digest = self._digest(name.encode())
        digest.update(body)
        return digest.digest()

    def _path(self, who: str, length: int, digest: str) -> Path:
        return self._folder / f"{who}-{length:x}-{digest}.ids"


def _is_stale(mtime: float) -> bool:
    return time.time() - mtime > _STALE_S


def _created(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
