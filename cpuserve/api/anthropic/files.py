"""The files of the Anthropic API, for clients that send the anthropic-version header."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter, Request, Response

from cpuserve.api.anthropic.by_header import HeaderRoute
from cpuserve.api.anthropic.errors import ANTHROPIC
from cpuserve.api.anthropic.page import limit_of, page_of_ids
from cpuserve.api.batches.directory import StoredFile, UploadFacts
from cpuserve.api.batches.facts import (
    UNKNOWN_TYPE,
    check_seconds,
    media_type_of,
    refuse_more,
    whole,
)
from cpuserve.api.batches.receive import content_of, find_file, receive_file, remove_file
from cpuserve.api.batches.start import batches_of
from cpuserve.api.request.headers import CALLER
from cpuserve.api.request.state import get_state
from cpuserve.api.response.openapi import response_types
from cpuserve.api.response.writer import json_response
from cpuserve.api.route import delete, get
from cpuserve.base.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cpuserve.api.batches.upload import Uploaded

_ALL = "/v1/files"
_ONE = _ALL + "/{file_id}"
_MOST_S = 90 * 86_400
_MOST_IDS = 100
_PAGE = "page_"
_CURSOR = re.compile(rf"{_PAGE}([0-9]{{1,12}})_([\w-]{{1,80}})", re.ASCII)
# /openapi.json describes each path once, and the OpenAI routes of these paths do that.
router = APIRouter(route_class=HeaderRoute, include_in_schema=False)


class FileMetadata(msgspec.Struct):
    """The description of a file. Times are in the format of RFC 3339."""

    id: str
    filename: str
    mime_type: str
    size_bytes: int
    created_at: str
    expires_at: str | None
    type: str = "file"
    downloadable: bool = True


class FilePage(msgspec.Struct):
    """The body of GET /v1/files. next_page: the `page` of the next request; null = the last page.

    Older clients read has_more, first_id and last_id, and send after_id or before_id.
    """

    data: list[FileMetadata]
    next_page: str | None
    has_more: bool
    first_id: str | None
    last_id: str | None


class RemovedFile(msgspec.Struct):
    """The response to DELETE /v1/files/ID."""

    id: str
    type: str = "file_deleted"


def _shown(stored: StoredFile) -> FileMetadata:
    file = stored.file
    ends = None if file.expires_at is None else _time(file.expires_at)
    kind = stored.media_type or UNKNOWN_TYPE
    return FileMetadata(file.id, file.filename, kind, file.bytes, _time(file.created_at), ends)


def _time(seconds: int) -> str:
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%dT%H:%M:%SZ}"


def _facts(part: Uploaded) -> UploadFacts:
    name, lasts_s = "expires_in_seconds", None
    if (purpose := part.fields.pop(name, None)) is not None:
        lasts_s = check_seconds(whole(purpose, name), name, _MOST_S)
    refuse_more(part.fields, f"file and {name}")
    return UploadFacts(part.name, "user_data", media_type_of(part.media_type, part.name), lasts_s)


@router.post(_ALL, openapi_extra=response_types(FileMetadata, ANTHROPIC.body, also=[408, 413, 415]))
async def upload_file(request: Request) -> Response:
    """Store an uploaded file, which blocks of messages name by its id."""
    return json_response(_shown(await receive_file(request, _facts)))


@get(router, _ALL, FilePage, dialect=ANTHROPIC, limit=int, page=str, ids=str)
async def list_files(request: Request) -> Response:
    """List the files of the caller, the newest first, or the files with the ids of the query."""
    own = batches_of(get_state(request)).directory.files(request.scope[CALLER].owner)
    known, query = {each.file.id: each for each in reversed(own)}, request.query_params
    wanted = [*query.getlist("ids"), *query.getlist("ids[]")]
    if wanted:
        if len(set(wanted)) > _MOST_IDS:
            msg = f"ids has {len(set(wanted))} ids: send at most {_MOST_IDS}"
            raise InvalidRequest(msg, param="ids")
        ids, more = [each for each in dict.fromkeys(wanted) if each in known], False
    elif (page := query.get("page")) is not None:
        ids, more = _page_after(known, page, limit_of(query))
    else:
        ids, more = page_of_ids(list(known), query)
    goes_on = more and "before_id" not in query
    following = f"{_PAGE}{known[ids[-1]].file.created_at}_{ids[-1]}" if goes_on else None
    shown = [_shown(known[each]) for each in ids]
    ends = (ids[0], ids[-1]) if ids else (None, None)
    return json_response(FilePage(shown, following, more, *ends))


def _page_after(files: Mapping[str, StoredFile], page: str, limit: int) -> tuple[list[str], bool]:
    """Return the ids of the page with this `next_page`, and whether there are more.

    files: the files of the caller, the newest first. The last file of the earlier page may have
    been deleted: the page then begins with the files that are no newer.
    """
    cursor = _CURSOR.fullmatch(page)
    if cursor is None:
        msg = f"page is {page[:200]!r}, which is no next_page of this list: begin without page"
        raise InvalidRequest(msg, param="page")
    created_at, last = int(cursor[1]), cursor[2]
    if last in files:
        ids = list(files)
        next_files = ids[ids.index(last) + 1 :]
    else:
        next_files = [name for name, file in files.items() if file.file.created_at <= created_at]
    return next_files[:limit], len(next_files) > limit


@get(router, _ONE, FileMetadata, dialect=ANTHROPIC)
async def get_file(request: Request) -> Response:
    """Return the description of a file, without its content."""
    return json_response(_shown(find_file(request)))


@get(router, f"{_ONE}/content", None, dialect=ANTHROPIC, media=UNKNOWN_TYPE)
async def get_content(request: Request) -> Response:
    """Return the content of a file."""
    return content_of(request)


@delete(router, _ONE, RemovedFile, dialect=ANTHROPIC)
async def delete_file(request: Request) -> Response:
    """Delete a file, unless a batch that has not ended reads it."""
    return json_response(RemovedFile(remove_file(request)))
