"""Uploads in parts: POST /v1/uploads, and the requests that add parts, complete and cancel them."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response

from cpuserve.api.batches.directory import UploadFacts
from cpuserve.api.batches.facts import (
    ExpiresAfter,
    check_purpose,
    lasts_after,
    media_type_of,
    refuse_more,
)
from cpuserve.api.batches.part_uploads import (
    MOST_PART_BYTES,
    PartUpload,
    PartUploads,
    UploadObject,
    UploadPart,
)
from cpuserve.api.batches.start import batches_of
from cpuserve.api.batches.upload import plain_name, read_upload
from cpuserve.api.request.context import RequestContext
from cpuserve.api.request.headers import CALLER
from cpuserve.api.request.state import get_state
from cpuserve.api.response.openapi import parameters, response_types
from cpuserve.api.response.writer import json_response
from cpuserve.api.route import post, post_nothing
from cpuserve.base.errors import InvalidRequest

router = APIRouter()
_ALL = "/v1/uploads"
_ONE = _ALL + "/{upload_id}"
_PARTS = f"{_ONE}/parts"
_PART = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["data"],
                "properties": {"data": {"type": "string", "format": "binary"}},
            }
        }
    },
}


class CreateUpload(msgspec.Struct):
    """The body of POST /v1/uploads; bytes: the size of the whole file."""

    filename: str
    purpose: str
    bytes: int
    mime_type: str
    expires_after: ExpiresAfter | None = None


class CompleteUpload(msgspec.Struct):
    """The body of POST /v1/uploads/ID/complete: the parts in order, and a checksum of the file."""

    part_ids: list[str]
    md5: str | None = None


def _uploads(request: Request) -> PartUploads:
    return batches_of(get_state(request)).uploads


def _find(request: Request) -> PartUpload:
    return _uploads(request).find(request.scope[CALLER].owner, request.path_params["upload_id"])


@post(
    router,
    _ALL,
    schema=CreateUpload,
    response=UploadObject,
    id_prefix="upload_",
    pages=False,
)
async def create_upload(request: RequestContext, body: CreateUpload) -> Response:
    """Begin the upload of a file in parts; it must be complete within an hour."""
    uploads = batches_of(request.state).uploads
    purpose = check_purpose(body.purpose)
    directory = batches_of(request.state).directory
    max_bytes = directory.used[1]
    if not 0 <= body.bytes <= max_bytes:
        msg = f"bytes must be from 0 to {max_bytes} (--files-bytes), got {body.bytes}"
        raise InvalidRequest(msg, param="bytes")
    name = plain_name(body.filename)
    facts = UploadFacts(
        name,
        purpose,
        media_type_of(body.mime_type, name),
        lasts_after(body.expires_after, "expires_after"),
    )
    return json_response(uploads.begin(request.owner, body.bytes, facts))


@router.post(
    _PARTS,
    openapi_extra={
        "requestBody": _PART,
        **response_types(UploadPart, also=[408, 413, 415]),
        **parameters(_PARTS),
    },
)
async def add_part(request: Request) -> Response:
    """Add a part to an upload: at most 64 MiB, in the field `data` of a form."""
    state, uploads, upload = get_state(request), _uploads(request), _find(request)
    directory, part_id = batches_of(state).directory, uploads.open_part(upload)
    size: int | None = None
    try:
        sent = await read_upload(
            request,
            directory,
            part_id,
            state.limits.body_timeout_s,
            field="data",
            most_bytes=MOST_PART_BYTES,
        )
        refuse_more(sent.fields, "data")
        size = directory.path_of(part_id).stat().st_size
    finally:
        made = uploads.close_part(upload, part_id, size)
    if made is None:  # the upload ended while the part arrived
        _find(request)
        msg = "The upload ended while this part arrived: begin a new one"
        raise InvalidRequest(msg, param="upload_id")
    return json_response(made)


@post(
    router,
    f"{_ONE}/complete",
    schema=CompleteUpload,
    response=UploadObject,
    id_prefix="upload_",
    pages=False,
)
async def complete_upload(request: RequestContext, body: CompleteUpload) -> Response:
    """Join the parts in the order of `part_ids`, and return the file."""
    uploads = batches_of(request.state).uploads
    upload = uploads.find(request.owner, request.path["upload_id"])
    return json_response(await uploads.complete(upload, body.part_ids, body.md5))


@post_nothing(router, f"{_ONE}/cancel", UploadObject)
async def cancel_upload(request: Request) -> Response:
    """End an upload, and delete its parts."""
    return json_response(_uploads(request).cancel(_find(request)))
