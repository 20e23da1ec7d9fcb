"""Read an upload (multipart/form-data) with one file, and write the file to disk as it arrives."""

from __future__ import annotations

import codecs
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpuserve.api.batches.directory import FileDirectory
from cpuserve.api.errors.http_errors import PayloadTooLarge, UnsupportedMediaType
from cpuserve.api.request.file_body import receive_body
from cpuserve.api.stored.disk import writing
from cpuserve.api.stored.owned_folder import open_plain, write_all
from cpuserve.base.errors import InvalidRequest
from cpuserve.base.fault_points import fault
from cpuserve.serving.threads import run_waiting

if TYPE_CHECKING:
    from fastapi import Request

# _MOST_FIELD: the maximum bytes of a form field. _MOST_HEADER: the maximum bytes of a part header.
# Longer ones are refused. Names of files and fields are cut to _MOST_NAME characters.
_MOST_FIELD, _MOST_HEADER, _MOST_NAME = 4096, 8192, 255
# Each part takes about 2 us on the event loop, even if it is empty.
_MOST_PARTS = 16
# The library would write a line to stderr for each malformed upload, which the response explains.
logging.getLogger("python_multipart").setLevel(logging.CRITICAL)


@dataclass(frozen=True, slots=True)
class Uploaded:
    """A file that was uploaded; its content is on disk.

    media_type: as the client declares it; "" = it does not.
    fields: the other fields of the form.
    undecodable: why the content is no text in UTF-8; "" = it is one.
    """

    name: str
    media_type: str
    fields: dict[str, str]
    undecodable: str


async def read_upload(
    request: Request,
    directory: FileDirectory,
    file_id: str,
    wait_s: float,
    *,
    field: str = "file",
    most_bytes: int | None = None,
) -> Uploaded:
    """Write an upload as the content of a new file, and return its name and the other fields.

    file_id: the id that directory.begin() returned.
    wait_s: how many seconds the client may pause.
    field: the field of the form with the file.
    most_bytes: the maximum size of the file; None = the room of the caller.

    Raises:
      UnsupportedMediaType: the body is not multipart/form-data.
      PayloadTooLarge: the file has more bytes than `most_bytes`, or than the caller may store.
      RequestTimeout: the client paused too long.
      InvalidRequest: the body is malformed, or has no file or several files.
      ClientGone: the client closed the connection.
      DiskError: the file cannot be written.
    """
    size = 0

    def reserve(num_bytes: int) -> None:
        nonlocal size
        size += num_bytes
        if most_bytes is not None and size > most_bytes:
            msg = f"{field} has more than {most_bytes} bytes: send smaller parts"
            raise PayloadTooLarge(msg)
        try:
            directory.grow(file_id, num_bytes)
        except InvalidRequest as full:
            raise PayloadTooLarge(full.message) from None

    path, most = directory.path_of(file_id), directory.room_of(file_id)
    parts = _Parts(_boundary(request), path, reserve, field)
    try:
        with writing("--files-dir"):
            await receive_body(
                request,
                parts.feed,
                most=most,
                wait_s=wait_s,
                paused=f"The client sent nothing for {wait_s:g} s: upload the file again",
                too_large=(
                    f"The upload is larger than {most} bytes, the room that is left: delete "
                    "files, or start the server with a larger --files-bytes"
                ),
            )
            found = parts.end()
            await parts.flush()
            return found
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        parts.close()


def plain_name(name: str) -> str:
    """Return the name of a file without its directories, in at most 255 characters."""
    return name.replace("\\", "/").rpartition("/")[2][:_MOST_NAME] or "file.jsonl"


def _boundary(request: Request) -> bytes:
    from python_multipart.multipart import parse_options_header

    declared = request.headers.get("content-type", "")
    kind, options = parse_options_header(declared)
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        msg = (
            f"Content-Type is {declared[:80]!r}: send multipart/form-data with the parts purpose "
            "and file"
        )
        raise UnsupportedMediaType(msg)
    return options[b"boundary"]


def _malformed(error: ValueError) -> InvalidRequest:
    return InvalidRequest(f"The body is no valid multipart/form-data: {error}")


def _too_much() -> InvalidRequest:
    return InvalidRequest("The upload has too many or too long fields: send purpose and file")


class _Parts:
    """The parts of an upload: writes the file to disk, and stores the other fields in memory."""

    def __init__(
        self, boundary: bytes, path: Path, reserve: Callable[[int], None], file_field: str = "file"
    ) -> None:
        """reserve: makes room for a number of bytes, before they are written to `path`.

        file_field: the field with the file.

        Raises InvalidRequest if the boundary is too long.
        """
        from python_multipart.exceptions import FormParserError
        from python_multipart.multipart import MultipartParser

        self._path = path
        self._reserve = reserve
        self._file_field = file_field
        self._out: int | None = None
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._undecodable = ""
        self._ended = False
        self._in_preamble: bool | None = None  # None: nothing has arrived
        self._num_parts = 0
        self._name = b""
        self._value = b""
        self._disposition = b""
        self._declared = b""
        self._field: str | None = None
        self._fields: dict[str, str] = {}
        self._file_name: str | None = None
        self._media_type = ""
        self._data = bytearray()
        callbacks: dict[str, Callable[..., Any]] = {
            "on_part_begin": self._begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_finished,
            "on_part_data": self._part_data,
            "on_part_end": self._part_end,
            "on_end": self._end,
        }
        try:
            self._parser = MultipartParser(boundary, callbacks)  # type: ignore[arg-type]
        except FormParserError as error:
            raise _malformed(error) from None

    def feed(self, data: bytes) -> None:
        """Parse more bytes of the body."""
        from python_multipart.exceptions import FormParserError

        data = self._without_preamble(data)
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _malformed(error) from None

    def _without_preamble(self, data: bytes) -> bytes:
        """Return `data` from the first boundary on, if the body begins with a line break.

        The parser skips text there as well, but it forgets that at the end of a piece.
        """
        if self._in_preamble is None and data:
            self._in_preamble = data.startswith((b"\r", b"\n"))
        if self._in_preamble:
            data = data[data.find(b"-") :] if b"-" in data else b""
            self._in_preamble = not data
        return data

    def end(self) -> Uploaded:
        """Return the file and the other fields of the form, after the end of the body."""
        if not self._ended:
            msg = "The body of the upload ends too early: send it again"
            raise InvalidRequest(msg)
        if self._file_name is None:
            field = self._file_field
            msg = f"{field} is missing: send the part {field} with the name of a file"
            raise InvalidRequest(msg, param=field, code="missing_required_parameter")
        return Uploaded(self._file_name, self._media_type, self._fields, self._undecodable)

    async def flush(self) -> None:
        """Return when the disk has the whole file, so that an accepted upload is never lost."""
        if (out := self._out) is not None:
            fault("content.sync")
            await run_waiting(lambda: os.fsync(out))

    def close(self) -> None:
        """Close the file that the upload is written to."""
        if self._out is not None:
            os.close(self._out)
            self._out = None

    def _begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MOST_PARTS:
            raise _too_much()
        self._name = self._value = self._disposition = self._declared = b""
        self._field = None
        self._data = bytearray()

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]
        self._check_header()

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]
        self._check_header()

    def _check_header(self) -> None:
        if len(self._name) + len(self._value) > _MOST_HEADER:
            msg = f"A header of the upload has more than {_MOST_HEADER} bytes: send a shorter one"
            raise InvalidRequest(msg)

    def _header_end(self) -> None:
        if self._name.lower() == b"content-disposition":
            self._disposition = self._value
        elif self._name.lower() == b"content-type":
            self._declared = self._value
        self._name = self._value = b""

    def _headers_finished(self) -> None:
        from python_multipart.multipart import parse_options_header

        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode("utf-8", "replace")
        self._field = name
        if name != self._file_field:
            return
        if self._file_name is not None:
            msg = "The upload has several files: send one"
            raise InvalidRequest(msg, param=name)
        self._file_name = plain_name(options.get(b"filename", b"").decode("utf-8", "replace"))
        self._media_type = self._declared.decode("utf-8", "replace").strip()[:_MOST_NAME]
        self._out = open_plain(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        piece = data[start:end]
        if self._field == self._file_field:
            self._decode(piece)
            assert self._out is not None
            self._reserve(len(piece))
            write_all(self._out, piece)
            return
        self._data += piece
        if len(self._data) > _MOST_FIELD:
            raise _too_much()

    def _part_end(self) -> None:
        if self._field == self._file_field:
            self._decode(b"", final=True)
        elif self._field is not None:
            self._fields[self._field[:_MOST_NAME]] = self._data.decode("utf-8", "replace")

    def _end(self) -> None:
        self._ended = True

    def _decode(self, piece: bytes, *, final: bool = False) -> None:
        if self._undecodable:
            return
        try:
            self._utf8.decode(piece, final)
        except UnicodeDecodeError as error:
            self._undecodable = error.reason
