"""Files: POST /v1/files, and the requests that list, read and delete files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter, Request, Response

from cpuserve.api.batches.directory import FileObject, UploadFacts
from cpuserve.api.batches.facts import (
    PURPOSES,
    UNKNOWN_TYPE,
    check_purpose,
    expires_in,
    media_type_of,
    refuse_more,
)
from cpuserve.api.batches.receive import content_of, find_file, receive_file, remove_file
from cpuserve.api.batches.start import batches_of
from cpuserve.api.request.headers import CALLER
from cpuserve.api.request.state import get_state
from cpuserve.api.response.openapi import response_types
from cpuserve.api.response.writer import json_response
from cpuserve.api.route import delete, get
from cpuserve.api.stored.page import Page, page_of

if TYPE_CHECKING:
    from cpuserve.api.batches.upload import Uploaded

router = APIRouter()
_FILE = "/v1/files/{file_id}"
_KNOWN = "purpose, file and expires_after"
_UPLOAD = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["purpose", "file"],
                "properties": {
                    "purpose": {"type": "string", "enum": list(PURPOSES)},
                    "file": {"type": "string", "format": "binary"},
                },
            }
        }
    },
}


class DeletedFile(msgspec.Struct):
    """The response to DELETE /v1/files/ID."""

    id: str
    object: str = "file"
    deleted: bool = True


def _facts(part: Uploaded) -> UploadFacts:
    purpose = check_purpose(part.fields.pop("purpose", None))
    lasts_s = expires_in(part.fields)
    refuse_more(part.fields, _KNOWN)
    return UploadFacts(part.name, purpose, media_type_of(part.media_type, part.name), lasts_s)


@router.post(
    "/v1/files",
    openapi_extra={"requestBody": _UPLOAD, **response_types(FileObject, also=[408, 413, 415])},
)
async def upload_file(request: Request) -> Response:
    """Store an uploaded file: the lines of a batch, or a file that requests name by its id."""
    return json_response((await receive_file(request, _facts)).file)


@get(router, "/v1/files", Page, after=str, limit=int, order=str, purpose=str)
async def list_files(request: Request) -> Response:
    """List the files of the caller."""
    found = batches_of(get_state(request)).directory.files(request.scope[CALLER].owner)
    purpose = request.query_params.get("purpose")
    shown = [file.file for file in found if purpose in (None, file.file.purpose)]
    page = page_of(request.query_params, shown, lambda file: file.id, msgspec.json.encode)
    return json_response(page)


@get(router, _FILE, FileObject)
async def get_file(request: Request) -> Response:
    """Return the description of a file, without its content."""
    return json_response(find_file(request).file)


@get(router, f"{_FILE}/content", None, media=UNKNOWN_TYPE)
async def get_content(request: Request) -> Response:
    """Return the content of a file."""
    return content_of(request)


@delete(router, _FILE, DeletedFile)
async def delete_file(request: Request) -> Response:
    """Delete a file, unless a batch that has not ended reads it."""
    return json_response(DeletedFile(remove_file(request)))
