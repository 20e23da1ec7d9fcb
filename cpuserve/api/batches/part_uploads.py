"""PartUploads: files that arrive in parts, which may be sent in any order and at the same time."""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import os
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from cpuserve.api.batches.directory import FileDirectory, FileObject, UploadFacts
from cpuserve.api.batches.facts import check_content
from cpuserve.api.stored.disk import DiskError, writing
from cpuserve.api.stored.owned_folder import open_plain, write_all
from cpuserve.base.errors import InvalidRequest, NotFound
from cpuserve.base.fault_points import fault
from cpuserve.base.ids import guarding_id
from cpuserve.base.log import get_logger
from cpuserve.serving.threads import run_on_disk

if TYPE_CHECKING:
    from collections.abc import Sequence

log = get_logger("serve")
# The limits of the OpenAI API: the bytes of a part, and how long an upload may take.
MOST_PART_BYTES = 64 << 20
LASTS_S = 3600
# With the largest parts, this is more than the largest file of the OpenAI API (8 GB) needs.
MOST_PARTS = 1000
_PIECE = 1 << 20


class UploadObject(msgspec.Struct, kw_only=True):
    """An upload in parts, as responses show it; bytes: the size that its client announces."""

    id: str
    object: str = "upload"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: str = "pending"
    file: FileObject | None = None


class UploadPart(msgspec.Struct):
    """A part of an upload, as responses show it."""

    id: str
    created_at: int
    upload_id: str
    object: str = "upload.part"


@dataclass(slots=True)
class PartUpload:
    """An upload that is neither complete nor cancelled.

    file_id: the file that it becomes. parts: the bytes of each part, by the id of its content.
    num_open: how many parts are arriving.
    """

    caller: str
    shown: UploadObject
    facts: UploadFacts
    file_id: str
    parts: dict[str, int] = field(default_factory=dict)
    num_open: int = 0
    joining: bool = False
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class _WholeFile:
    """The checksum and the encoding of a file, while its parts are joined."""

    md5: Any = field(default_factory=lambda: hashlib.md5(usedforsecurity=False))
    utf8: codecs.IncrementalDecoder = field(default_factory=codecs.getincrementaldecoder("utf-8"))
    undecodable: str = ""

    def add(self, data: bytes, *, final: bool = False) -> None:
        self.md5.update(data)
        if not self.undecodable:
            try:
                self.utf8.decode(data, final)
            except UnicodeDecodeError as error:
                self.undecodable = error.reason


class PartUploads:
    """The unfinished uploads of all clients; they end with the server, or an hour after they began.

    An upload takes the place of its file (--files-count) when it begins, and its bytes
    (--files-bytes) as they arrive.
    """

    def __init__(self, directory: FileDirectory) -> None:
        self._directory = directory
        self._known: dict[str, PartUpload] = {}

    def begin(self, caller: str, size: int, facts: UploadFacts) -> UploadObject:
        """Return a new upload of `size` bytes; InvalidRequest if there is no room for its file."""
        now = int(time.time())
        upload_object = UploadObject(
            id=guarding_id("upload_"),
            bytes=size,
            created_at=now,
            expires_at=now + LASTS_S,
            filename=facts.filename,
            purpose=facts.purpose,
        )
        upload = PartUpload(caller, upload_object, facts, self._directory.begin(caller))
        loop = asyncio.get_running_loop()
        upload.timer = loop.call_later(LASTS_S, self._expire, upload)
        self._known[upload_object.id] = upload
        return upload_object

    def find(self, caller: str, upload_id: str) -> PartUpload:
        """Return an upload of the caller that can go on; NotFound if there is none."""
        upload = self._known.get(upload_id)
        if upload is None or upload.caller != caller:
            msg = (
                f"Upload {upload_id[:80]!r} was not found: it is complete, cancelled or older than "
                f"{LASTS_S} s, or the server was started again. Begin a new one (POST /v1/uploads)"
            )
            raise NotFound(msg, param="upload_id", code="upload_not_found")
        if upload.joining:
            msg = f"Upload {upload_id!r} is being completed: wait for the response to that request"
            raise InvalidRequest(msg, param="upload_id")
        return upload

    def open_part(self, upload: PartUpload) -> str:
        """Return the id of a new part, which `close_part` must follow."""
        if len(upload.parts) + upload.num_open >= MOST_PARTS:
            msg = f"An upload may have {MOST_PARTS} parts: send larger ones"
            raise InvalidRequest(msg, param="data")
        upload.num_open += 1
        return self._directory.begin(upload.caller, counts=False)

    def close_part(self, upload: PartUpload, part_id: str, size: int | None) -> UploadPart | None:
        """Add a part of `size` bytes, and return it; None = it was refused, or the upload ended."""
        upload.num_open -= 1
        if size is None or upload.joining or upload.shown.id not in self._known:
            self._directory.remove(part_id)
            return None
        upload.parts[part_id] = size
        return UploadPart(_shown_id(part_id), int(time.time()), upload.shown.id)

    def cancel(self, upload: PartUpload) -> UploadObject:
        """End an upload, and delete its parts."""
        self._drop(upload)
        return msgspec.structs.replace(upload.shown, status="cancelled")

    async def complete(
        self, upload: PartUpload, part_ids: Sequence[str], md5: str | None
    ) -> UploadObject:
        """Join the parts in this order to a file, and return the upload with it.

        Parts that are not named are deleted. If joining fails, the whole upload ends.

        Raises:
          InvalidRequest: the parts are not the file that was announced.
          DiskError: the file cannot be written.
        """
        parts_by_id = {_shown_id(part): part for part in upload.parts}
        _check_parts(upload, part_ids, parts_by_id)
        upload.joining = True
        directory, whole_file = self._directory, _WholeFile()
        try:
            for name in part_ids:
                part = parts_by_id[name]
                directory.grow(upload.file_id, upload.parts[part])
                with writing("--files-dir"):
                    await run_on_disk(partial(self._append, upload.file_id, part, whole_file))
                directory.remove(part)
                del upload.parts[part]
            with writing("--files-dir"):
                await run_on_disk(partial(self._flush, upload.file_id))
            whole_file.add(b"", final=True)
            _check_md5(md5, whole_file.md5.hexdigest())
            check_content(upload.facts.purpose, whole_file.undecodable)
            file = await directory.add(upload.caller, upload.file_id, upload.facts)
        except BaseException:
            self._drop(upload)
            raise
        upload.file_id = ""  # it is a file now, and no longer part of the upload
        self._drop(upload)
        return msgspec.structs.replace(upload.shown, status="completed", file=file)

    def _append(self, file_id: str, part_id: str, whole_file: _WholeFile) -> None:
        directory = self._directory
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        out = open_plain(directory.path_of(file_id), flags)
        try:
            fault("content.read")
            with os.fdopen(open_plain(directory.path_of(part_id)), "rb") as source:
                while data := source.read(_PIECE):
                    whole_file.add(data)
                    write_all(out, data)
        finally:
            os.close(out)

    def _flush(self, file_id: str) -> None:
        handle = open_plain(self._directory.path_of(file_id), os.O_WRONLY | os.O_CREAT)
        try:
            fault("content.sync")
            os.fsync(handle)
        finally:
            os.close(handle)

    def _expire(self, upload: PartUpload) -> None:
        if not upload.joining:
            try:
                self._drop(upload)
            except DiskError as error:  # the next start deletes them
                log.warning("the parts of an old upload cannot be deleted: %s", error)

    def _drop(self, upload: PartUpload) -> None:
        """Forget an upload, and delete its parts and its file."""
        self._known.pop(upload.shown.id, None)
        if upload.timer is not None:
            upload.timer.cancel()
        for name in [*upload.parts, *filter(None, (upload.file_id,))]:
            self._directory.remove(name)
        upload.parts.clear()


def _shown_id(part_id: str) -> str:
    """Return the id of a part in responses; the ids of contents begin with "file-"."""
    return "part_" + part_id.removeprefix("file-")


def _check_parts(upload: PartUpload, part_ids: Sequence[str], parts_by_id: dict[str, str]) -> None:
    if upload.num_open:
        msg = f"{upload.num_open} parts of the upload are still arriving: wait for their responses"
        raise InvalidRequest(msg, param="part_ids")
    for name in part_ids:
        if name not in parts_by_id:
            msg = f"part_ids has {name[:80]!r}, which is no part of this upload"
            raise InvalidRequest(msg, param="part_ids")
    if len(set(part_ids)) != len(part_ids):
        msg = "part_ids has the same part twice: name each part once"
        raise InvalidRequest(msg, param="part_ids")
    size = sum(upload.parts[parts_by_id[name]] for name in part_ids)
    if size != upload.shown.bytes:
        msg = (
            f"the parts have {size} bytes, and the upload was announced with {upload.shown.bytes}: "
            "send the missing parts, or begin again with the true size"
        )
        raise InvalidRequest(msg, param="part_ids")


def _check_md5(announced: str | None, md5: str) -> None:
    if announced is not None and announced.lower() != md5:
        msg = f"md5 is {announced[:80]!r}, and the file has {md5}: upload it again"
        raise InvalidRequest(msg, param="md5")
