"""FileDirectory: the files and the records of batches in one directory on disk.

DIR/files has the content of a file as ID.data and its description as ID.json.
DIR/batches has the record of each batch. Descriptions and records are replaced atomically,
after the content is complete, so a server that was killed leaves no partial file or record.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from cpuserve.api.callers.known_callers import KnownCallers
from cpuserve.api.stored.disk import DiskError, writing
from cpuserve.api.stored.owned_folder import OwnedFolder, open_plain, read_records, write_whole
from cpuserve.api.stored.quota import Quota
from cpuserve.base.errors import InvalidRequest, NotFound
from cpuserve.base.fault_points import fault
from cpuserve.base.ids import guarding_id
from cpuserve.base.log import get_logger
from cpuserve.serving.threads import run_on_disk

log = get_logger("serve")
S = TypeVar("S", bound=msgspec.Struct)
_PLACE = "--files-dir"


class FileObject(msgspec.Struct, kw_only=True):
    """The description of a file, as responses show it; expires_at: None = it stays."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: str = "processed"
    expires_at: int | None = None


class StoredFile(msgspec.Struct, kw_only=True):
    """The description of a file on disk.

    caller: its owner (Caller.owner).
    media_type: as the client declared it, or as the name of the file says; "" = unknown.
    """

    caller: str
    file: FileObject
    media_type: str = ""


@dataclass(frozen=True, slots=True)
class UploadFacts:
    """The facts that an upload states of a file; lasts_s: until it expires, None = never."""

    filename: str
    purpose: str
    media_type: str = ""
    lasts_s: int | None = None


@dataclass(slots=True)
class _Content:
    """The content of a file: its owner and bytes, and whether it counts as one of the files."""

    caller: str
    bytes: int = 0
    counts: bool = False


class FileDirectory:
    """The files of all clients, with limits on their total bytes and their number.

    Room is reserved before anything is written, so that requests that run at the same time
    cannot exceed the limits together.
    """

    def __init__(
        self, place: str, max_bytes: int, max_files: int, callers: KnownCallers | None = None
    ) -> None:
        """`place`: the directory, which is created if it is missing.

        callers: the owners of files, which have shares of the limits (see Quota).

        Raises:
          ConfigError: the directory cannot be written, or another server uses it.
        """
        self.max_files = max_files
        self.callers = callers or KnownCallers()
        self._bytes = Quota(max_bytes, self.owners)
        self._count = Quota(max_files, self.owners)
        self._contents: dict[str, _Content] = {}
        # Whether a batch that has not ended reads a file; such a file does not expire.
        self.is_read: Callable[[str], bool] = lambda _: False
        root = Path(place).expanduser()
        self._folder = OwnedFolder(f"{_PLACE} {place}", root, ("files", "batches"))
        self._files, self._batches = self._folder.parts
        self._damaged: list[Path] = []
        self._known = {
            path.stem: found
            for path, found in read_records(self._files, StoredFile, self._damaged)
            if _is_of(path, found.file.id, self._damaged)
        }
        for found in self._known.values():
            if (owner := self.callers.current_owner(found.caller)) != found.caller:
                found.caller = owner
                self._rewrite(self._files / f"{found.file.id}.json", found)
        for file_id, found in self._known.items():
            self._measure(file_id, found.caller, counts=True)
        self._folder.drop_unfinished()

    def owners(self) -> tuple[str, ...]:
        """Return the callers that have shares of all limits."""
        return self.callers.owners

    def close(self) -> None:
        """Release the lock, so that another server may use the directory."""
        self._folder.close()

    def path_of(self, file_id: str) -> Path:
        """Return the path of a file's content; file_id: an id that `new_id` returned."""
        return self._files / f"{file_id}.data"

    def used_bytes(self) -> int:
        """Return the total size of all files in bytes, including files that are being written."""
        return self._bytes.total

    @property
    def used(self) -> tuple[int, int]:
        """The total size of all files in bytes, and the most that it may be."""
        return self._bytes.total, self._bytes.limit

    def resume(self, file_id: str, caller: str) -> None:
        """Count the content of a batch that is on disk already, unless it is counted."""
        if file_id not in self._contents:
            self._measure(file_id, caller)

    def room_of(self, file_id: str) -> int:
        """Return how many more bytes the caller of a file may store now."""
        return max(0, self._bytes.room(self._contents[file_id].caller))

    def begin(self, caller: str, *, counts: bool = True) -> str:
        """Return the id of a new file of a caller; `grow` makes room for its content.

        counts: whether it is one of the files that --files-count limits.

        Raises:
          InvalidRequest: the caller has no room for another file.
        """
        self._drop_expired()
        if counts and not self._count.take(caller, 1):
            msg = (
                f"The server stores {self._count.total} files, and may store {self.max_files} "
                "(with a share for each caller): delete files, or start the server with a larger "
                "--files-count"
            )
            raise InvalidRequest(msg, param="file", code="files_full")
        made = guarding_id("file-")
        self._contents[made] = _Content(caller, counts=counts)
        return made

    def grow(self, file_id: str, num_bytes: int) -> None:
        """Reserve `num_bytes` more for a file, before they are written.

        Raises:
          InvalidRequest: the caller has no room for them.
        """
        content = self._contents[file_id]
        if not self._bytes.take(content.caller, num_bytes):
            msg = (
                f"The files on the server have {self._bytes.total} bytes, and may have "
                f"{self._bytes.limit} (with a share for each caller): delete files, send a "
                "smaller one, or start the server with a larger --files-bytes"
            )
            raise InvalidRequest(msg, param="file", code="files_full")
        content.bytes += num_bytes

    def shrink(self, file_id: str, num_bytes: int) -> None:
        """Give back `num_bytes` that were reserved for a file and not written."""
        content = self._contents[file_id]
        self._bytes.add(content.caller, -num_bytes)
        content.bytes -= num_bytes

    def _measure(self, file_id: str, caller: str, *, counts: bool = False) -> None:
        """Count a file that is on disk already."""
        path = self.path_of(file_id)
        size = path.stat().st_size if path.exists() else 0
        self._contents[file_id] = _Content(caller, size, counts)
        self._bytes.add(caller, size)
        self._count.add(caller, int(counts))

    async def write(self, file_id: str, lines: Iterable[bytes]) -> None:
        """Write the content of a new file; DiskError if the disk does not take all of it."""
        await run_on_disk(partial(self._write, file_id, lines))

    def _write(self, file_id: str, lines: Iterable[bytes]) -> None:
        with writing(_PLACE):
            handle = open_plain(self.path_of(file_id), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            with os.fdopen(handle, "wb") as out:
                out.writelines(lines)
                out.flush()
                fault("content.sync")
                os.fsync(out.fileno())

    async def add(self, caller: str, file_id: str, facts: UploadFacts) -> FileObject:
        """Store the description of the content at path_of(file_id), and return it as a file.

        Raises:
          DiskError: the description cannot be written.
          CancelledError: the description is on disk, and `remove` must follow, or another `add`.
        """
        size = self.path_of(file_id).stat().st_size
        now, lasts_s = int(time.time()), facts.lasts_s
        made = FileObject(
            id=file_id,
            bytes=size,
            created_at=now,
            filename=facts.filename,
            purpose=facts.purpose,
            expires_at=None if lasts_s is None else now + lasts_s,
        )
        stored = StoredFile(caller=caller, file=made, media_type=facts.media_type)
        await self._replaced(self._files / f"{file_id}.json", stored)
        self._known[file_id] = stored
        content = self._contents[file_id]
        if not content.counts:  # results of a batch become a file, whatever the limit
            content.counts = True
            self._count.add(caller, 1)
        return made

    def files(self, caller: str) -> list[StoredFile]:
        """Return the files of a caller, oldest first."""
        self._drop_expired()
        own = [file for file in self._known.values() if file.caller == caller]
        return sorted(own, key=lambda file: file.file.created_at)

    def find(self, caller: str, file_id: str, param: str = "file_id") -> StoredFile:
        """Return the caller's file with this id; NotFound if there is none."""
        file = self._known.get(file_id)
        if file is None or file.caller != caller or self._is_expired(file):
            msg = f"File {file_id[:80]!r} was not found: GET /v1/files lists your files"
            raise NotFound(msg, param=param, code="file_not_found")
        return file

    def _is_expired(self, file: StoredFile) -> bool:
        end = file.file.expires_at
        return end is not None and end <= time.time() and not self.is_read(file.file.id)

    def _drop_expired(self) -> None:
        for file in [file for file in self._known.values() if self._is_expired(file)]:
            try:
                self.remove(file.file.id)
            except DiskError as error:  # a later request tries again
                log.warning("file %s has expired and cannot be deleted: %s", file.file.id, error)
                return

    def remove(self, file_id: str) -> None:
        """Delete a file and its description; a missing file is no error.

        Raises:
          DiskError: the directory cannot be written; the file is still there.
        """
        with writing(_PLACE):
            (self._files / f"{file_id}.json").unlink(missing_ok=True)
            self.path_of(file_id).unlink(missing_ok=True)
        self._known.pop(file_id, None)
        if (content := self._contents.pop(file_id, None)) is not None:
            self._bytes.add(content.caller, -content.bytes)
            self._count.add(content.caller, -int(content.counts))

    async def save(self, name: str, record: msgspec.Struct) -> None:
        """Write the record of the batch `name` to disk, in place of an earlier record.

        Raises:
          DiskError: the record cannot be written; the earlier record is still there.
          CancelledError: the record is on disk.
        """
        await self._replaced(self._batches / f"{name}.json", record)

    async def _replaced(self, path: Path, value: msgspec.Struct) -> None:
        with writing(_PLACE):
            await run_on_disk(partial(write_whole, path, value))

    def delete_record(self, name: str) -> None:
        """Delete the record of the batch `name`; a missing record is no error.

        Raises:
          DiskError: the record cannot be deleted.
        """
        with writing(_PLACE):
            (self._batches / f"{name}.json").unlink(missing_ok=True)

    def records(self, kind: type[S]) -> list[S]:
        """Return the records of all batches; damaged ones are logged and left out."""
        return [found for _, found in read_records(self._batches, kind, self._damaged)]

    def adopt(self, name: str, record: msgspec.Struct) -> None:
        """Write the record of the batch `name` with its new owner."""
        self._rewrite(self._batches / f"{name}.json", record)

    def _rewrite(self, path: Path, record: msgspec.Struct) -> None:
        try:
            write_whole(path, record)
        except OSError as error:  # the disk may be full; the next start tries again
            log.warning("the owner in %s cannot be updated: %s", path, error.strerror)

    def keep_only(self, used: Mapping[str, str]) -> None:
        """Delete content that belongs to no known file and is not in `used`.

        Nothing is deleted if a record is damaged, because the content may belong to it.

        used: the callers of the contents that belong to batches, by the ids of the contents.
        """
        for path in self._files.glob("*.data"):
            if path.stem in self._known or path.stem in used:
                continue
            if self._damaged:
                self._measure(path.stem, "")
            else:
                path.unlink()
        for file_id, caller in used.items():
            self.resume(file_id, caller)


def _is_of(path: Path, file_id: str, damaged: list[Path]) -> bool:
    """Return whether a description has its own file's id; otherwise it counts as damaged."""
    if path.stem != file_id:
        log.error("%s is damaged and left out (it describes %r): delete it", path, file_id)
        damaged.append(path)
    return path.stem == file_id
