"""Files and batches: POST /v1/files and /v1/batches, and the requests that read and change them."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from starlette.responses import FileResponse

from cpuserve.api.batches.directory import FileObject
from cpuserve.api.batches.lines import ENDPOINTS
from cpuserve.api.batches.service import BatchObject, BatchService
from cpuserve.api.batches.start import batches_of
from cpuserve.api.batches.upload import read_upload
from cpuserve.api.openai.responses.schema import check_metadata
from cpuserve.api.request.context import RequestContext
from cpuserve.api.request.headers import CALLER
from cpuserve.api.request.state import get_state
from cpuserve.api.response.openapi import response_types
from cpuserve.api.response.writer import json_response
from cpuserve.api.route import delete, get, post, post_nothing
from cpuserve.api.stored.page import Page, page_of
from cpuserve.errors import InvalidRequest, brief

router = APIRouter()
_FILE = "/v1/files/{file_id}"
_ANY = "application/octet-stream"
_UPLOAD = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["purpose", "file"],
                "properties": {
                    "purpose": {"type": "string", "enum": ["batch"]},
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


def _batches(request: Request) -> BatchService:
    return batches_of(get_state(request))


def _named(request: Request) -> FileObject:
    directory = _batches(request).directory
    return directory.find(request.scope[CALLER].owner, request.path_params["file_id"])


@router.post(
    "/v1/files",
    openapi_extra={"requestBody": _UPLOAD, **response_types(FileObject, also=[408, 413, 415])},
)
async def upload_file(request: Request) -> Response:
    """Store an uploaded file of JSON lines as the input of a batch."""
    directory, limits = _batches(request).directory, get_state(request).limits
    caller = request.scope[CALLER].owner
    made = directory.begin(caller)
    try:
        name, fields = await read_upload(request, directory, made, limits.body_timeout_s)
        if (purpose := fields.pop("purpose", None)) != "batch":
            msg = f"purpose must be batch, got {brief(purpose)!r}"
            raise InvalidRequest(msg, param="purpose")
        for field in fields:
            msg = f"{field[:80]} is not supported: send purpose and file"
            raise InvalidRequest(msg, param=field[:80], code="unsupported_parameter")
        return json_response(await directory.add(caller, made, name, purpose))
    except BaseException:
        directory.remove(made)
        raise


@get(router, "/v1/files", Page, after=str, limit=int, order=str, purpose=str)
async def list_files(request: Request) -> Response:
    """List the files of the caller."""
    found = _batches(request).directory.files(request.scope[CALLER].owner)
    purpose = request.query_params.get("purpose")
    shown = [file for file in found if purpose in (None, file.purpose)]
    page = page_of(request.query_params, shown, lambda file: file.id, msgspec.json.encode)
    return json_response(page)


@get(router, _FILE, FileObject)
async def get_file(request: Request) -> Response:
    """Return the description of a file, without its content."""
    return json_response(_named(request))


@get(router, f"{_FILE}/content", None, media=_ANY)
async def get_content(request: Request) -> Response:
    """Return the content of a file."""
    path = _batches(request).directory.path_of(_named(request).id)
    return FileResponse(path, media_type=_ANY)


@delete(router, _FILE, DeletedFile)
async def delete_file(request: Request) -> Response:
    """Delete a file, unless a batch that has not ended reads it."""
    batches, found = _batches(request), _named(request)
    if batches.uses(found.id):
        msg = f"File {found.id!r} is the input of a batch that has not ended: cancel the batch"
        raise InvalidRequest(msg, param="file_id")
    batches.directory.remove(found.id)
    return json_response(DeletedFile(found.id))


_ONE = "/v1/batches/{batch_id}"


class CreateBatch(msgspec.Struct):
    """The body of POST /v1/batches; output_expires_after is refused, as files never expire."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: dict[str, Any] | None = None


@post(
    router,
    "/v1/batches",
    schema=CreateBatch,
    response=BatchObject,
    id_prefix="batch_",
    pages=False,
)
async def create_batch(request: RequestContext, body: CreateBatch) -> Response:
    """Create a batch of the requests in a file; it runs after earlier batches of the caller."""
    batches = batches_of(request.state)
    if body.endpoint not in ENDPOINTS:
        msg = f"endpoint must be one of {', '.join(ENDPOINTS)}, got {body.endpoint[:80]!r}"
        raise InvalidRequest(msg, param="endpoint")
    if body.completion_window != "24h":
        msg = f"completion_window must be 24h, got {body.completion_window[:80]!r}"
        raise InvalidRequest(msg, param="completion_window")
    if body.output_expires_after is not None:
        msg = "output_expires_after is not supported: omit it, and delete the file"
        raise InvalidRequest(msg, param="output_expires_after", code="unsupported_parameter")
    check_metadata(body.metadata or {})
    made = await batches.create(request.owner, body.endpoint, body.input_file_id, body.metadata)
    return json_response(made)


@get(router, "/v1/batches", Page, after=str, limit=int)
async def list_batches(request: Request) -> Response:
    """List the batches of the caller, the newest first."""
    found = batches_of(get_state(request)).batches(request.scope[CALLER].owner)
    page = page_of(
        request.query_params,
        [record.batch for record in found],
        lambda batch: batch.id,
        msgspec.json.encode,
    )
    return json_response(page)


@get(router, _ONE, BatchObject)
async def get_batch(request: Request) -> Response:
    """Return a batch: its status, the number of finished lines, and the ids of result files."""
    batches, name = batches_of(get_state(request)), request.path_params["batch_id"]
    return json_response(batches.find(request.scope[CALLER].owner, name).batch)


@post_nothing(router, f"{_ONE}/cancel", BatchObject)
async def cancel_batch(request: Request) -> Response:
    """Cancel a batch; clients can still read the results of lines that have finished."""
    batches, name = batches_of(get_state(request)), request.path_params["batch_id"]
    return json_response((await batches.cancel(request.scope[CALLER].owner, name)).batch)
