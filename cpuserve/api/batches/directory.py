"""FileDirectory: the files and the records of batches in one directory on disk.

DIR/files has the content of a file as ID.data and its description as ID.json.
DIR/batches has the record of each batch. Descriptions and records are replaced atomically,
after the content is complete, so a server that was killed leaves no partial file or record.
"""

from __future__ import annotations

import fcntl
import os
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from cpuserve.api.response.disk import writing
from cpuserve.errors import ConfigError, InvalidRequest, NotFound

S = TypeVar("S", bound=msgspec.Struct)
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC
_PLACE = "--files-dir"


class FileObject(msgspec.Struct, kw_only=True):
    """The description of a file, as responses show it."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: str = "processed"


class StoredFile(msgspec.Struct, kw_only=True):
    """The description of a file on disk, with the id of the caller that owns the file."""

    caller: str
    file: FileObject


class FileDirectory:
    """The files of all clients, with limits on their total bytes and their number."""

    def __init__(self, place: str, max_bytes: int, max_files: int) -> None:
        """`place`: the directory, which is created if it is missing.

        Raises:
          ConfigError: the directory cannot be written, or another server uses it.
        """
        self.max_bytes = max_bytes
        self.max_files = max_files
        self._files = Path(place) / "files"
        self._batches = Path(place) / "batches"
        try:
            for folder in (self._files, self._batches):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # The system releases the lock when the process ends, even if the process is killed.
            self._lock = os.open(Path(place) / "lock", os.O_RDWR | os.O_CREAT | _FLAGS, 0o600)
        except OSError as error:
            msg = f"--files-dir {place} cannot be used ({error.strerror}): choose another directory"
            raise ConfigError(msg) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            msg = f"another server uses --files-dir {place}: choose another directory"
            raise ConfigError(msg) from None
        self._known = {found.file.id: found for found in self._read(self._files, StoredFile)}
        self._drop_unknown()

    def close(self) -> None:
        """Release the lock, so that another server may use the directory."""
        os.close(self._lock)

    def path_of(self, file_id: str) -> Path:
        """Return the path of a file's content; file_id: an id that `new_id` returned."""
        return self._files / f"{file_id}.data"

    def used_bytes(self) -> int:
        """Return the total size of all files in bytes, including files that are being written."""
        return sum(path.stat().st_size for path in self._files.glob("*.data"))

    def check_room(self, num_bytes: int, new_files: int = 0) -> None:
        """Raise InvalidRequest if `num_bytes` and `new_files` more would exceed the limits."""
        if len(self._known) + new_files > self.max_files:
            msg = (
                f"The server stores {len(self._known)} files, and may store {self.max_files}: "
                "delete files, or start the server with a larger --files-count"
            )
            raise InvalidRequest(msg, param="file", code="files_full")
        if (used := self.used_bytes()) + num_bytes > self.max_bytes:
            msg = (
                f"The files on the server have {used} bytes, and may have {self.max_bytes}: "
                "delete files, send a smaller one, or start the server with a larger --files-bytes"
            )
            raise InvalidRequest(msg, param="file", code="files_full")

    def new_id(self) -> str:
        """Return a new, unique id for a file."""
        return f"file-{uuid.uuid4().hex}"

    def write(self, file_id: str, lines: Iterable[bytes]) -> None:
        """Write the content of a new file; DiskError if the disk does not take all of it."""
        with writing(_PLACE):
            handle = open_plain(self.path_of(file_id), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            with os.fdopen(handle, "wb") as out:
                out.writelines(lines)
                out.flush()
                os.fsync(out.fileno())

    def add(self, caller: str, file_id: str, filename: str, purpose: str) -> FileObject:
        """Store the description of the content at path_of(file_id), and return it as a file.

        Raises:
          DiskError: the description cannot be written.
        """
        size = self.path_of(file_id).stat().st_size
        made = FileObject(
            id=file_id,
            bytes=size,
            created_at=int(time.time()),
            filename=filename,
            purpose=purpose,
        )
        stored = StoredFile(caller=caller, file=made)
        with writing(_PLACE):
            write_whole(self._files / f"{file_id}.json", stored)
        self._known[file_id] = stored
        return made

    def files(self, caller: str) -> list[FileObject]:
        """Return the files of a caller, oldest first."""
        own = [found.file for found in self._known.values() if found.caller == caller]
        return sorted(own, key=lambda found: found.created_at)

    def find(self, caller: str, file_id: str, param: str = "file_id") -> FileObject:
        """Return the caller's file with this id; NotFound if there is none."""
        found = self._known.get(file_id)
        if found is None or found.caller != caller:
            msg = f"File {file_id[:80]!r} was not found: GET /v1/files lists your files"
            raise NotFound(msg, param=param, code="file_not_found")
        return found.file

    def remove(self, file_id: str) -> None:
        """Delete a file and its description; a missing file is no error.

        Raises:
          DiskError: the directory cannot be written; the file is still there.
        """
        with writing(_PLACE):
            (self._files / f"{file_id}.json").unlink(missing_ok=True)
            self.path_of(file_id).unlink(missing_ok=True)
        self._known.pop(file_id, None)

    def save(self, name: str, record: msgspec.Struct) -> None:
        """Write the record of the batch `name` to disk, in place of an earlier record.

        Raises:
          DiskError: the record cannot be written; the earlier record is still there.
        """
        with writing(_PLACE):
            write_whole(self._batches / f"{name}.json", record)

    def delete_record(self, name: str) -> None:
        """Delete the record of the batch `name`; a missing record is no error.

        Raises:
          DiskError: the record cannot be deleted.
        """
        with writing(_PLACE):
            (self._batches / f"{name}.json").unlink(missing_ok=True)

    def records(self, kind: type[S]) -> list[S]:
        """Return the records of all batches."""
        return list(self._read(self._batches, kind))

    def keep_only(self, used: Iterable[str]) -> None:
        """Delete content that belongs to no known file and has no id in `used`."""
        kept = {*self._known, *used}
        for path in self._files.glob("*.data"):
            if path.stem not in kept:
                path.unlink()

    def _drop_unknown(self) -> None:
        for folder in (self._files, self._batches):
            for path in folder.glob("*.part"):
                path.unlink()

    def _read(self, folder: Path, kind: type[S]) -> Iterable[S]:
        for path in sorted(folder.glob("*.json")):
            try:
                yield msgspec.json.decode(path.read_bytes(), type=kind)
            except msgspec.DecodeError as error:
                msg = f"{path} is damaged ({error}): delete it, and start the server again"
                raise ConfigError(msg) from None


def open_plain(path: Path, flags: int = os.O_RDONLY) -> int:
    """Return a descriptor of a plain file; OSError if it is a link."""
    return os.open(path, flags | _FLAGS, 0o600)


def write_whole(path: Path, value: msgspec.Struct) -> None:
    """Replace a file atomically by the JSON of `value`: readers see the old or the new content."""
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    handle = open_plain(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(msgspec.json.encode(value))
            out.flush()
            os.fsync(out.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_all(handle: int, data: bytes | memoryview) -> None:
    """Write all of `data` to a descriptor, which may take several calls."""
    left = memoryview(data)
    while left:
        left = left[os.write(handle, left) :]
