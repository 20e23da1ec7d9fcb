"""POST /api/copy, DELETE /api/delete, and /api/blobs, which receives the files of models."""

from __future__ import annotations

import asyncio
import hashlib
import os
from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter, Request, Response

from cpuserve.api.errors.http_errors import PayloadTooLarge
from cpuserve.api.ollama.created.directory import open_new
from cpuserve.api.ollama.created.manifest import Manifest, checked_digest, checked_name
from cpuserve.api.ollama.created.store import created_models
from cpuserve.api.ollama.errors import OLLAMA, OllamaError
from cpuserve.api.request.context import BodyForm, RequestContext, read_call
from cpuserve.api.request.file_body import receive_body
from cpuserve.api.request.headers import OWNER
from cpuserve.api.request.state import get_state
from cpuserve.api.response.openapi import json_body, parameters, response_types
from cpuserve.api.route import get, post
from cpuserve.api.stored.disk import writing
from cpuserve.errors import InvalidRequest, NotFound

if TYPE_CHECKING:
    from pathlib import Path

    from cpuserve.api.ollama.created.directory import Room

router = APIRouter()
_BLOB = "/api/blobs/{digest}"
_UPLOAD = {
    "required": True,
    "content": {
        "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
    },
}


class OllamaCopy(msgspec.Struct):
    """The body of POST /api/copy."""

    source: str
    destination: str


class OllamaDelete(msgspec.Struct):
    """The body of DELETE /api/delete. Older clients send `name` for `model`."""

    model: str | None = None
    name: str | None = None


@post(
    router,
    "/api/copy",
    schema=OllamaCopy,
    response=None,
    dialect=OLLAMA,
    id_prefix="ollama-",
    pages=False,
)
async def copy(request: RequestContext, body: OllamaCopy) -> Response:
    """Serve a model under an additional name."""
    created = created_models(request.state)
    source = checked_name(body.source, "source")
    name = checked_name(body.destination, "destination")
    created.check_name(name, request.owner, "destination")
    found = created.find(source)
    if found is None:
        if source not in request.models.names:
            msg = f"model {source!r} was not found: /api/tags lists the models"
            raise NotFound(msg, code="model_not_found")
        found = Manifest(
            name=source,
            base=source,
            model=created.sources.get(source, ""),
            parent=source,
            created=request.created,
        )
    await created.copy(found, name, request.owner)
    return Response(status_code=200)


@router.delete("/api/delete", openapi_extra=json_body(OllamaDelete, None, OllamaError))
async def delete(request: Request) -> Response:
    """Delete a model that a client created or pulled; running requests to it may finish."""
    form = BodyForm("ollama-", OllamaDelete)
    async with read_call(request, lambda _: form) as (received, body):
        name = checked_name(body.model or body.name)
        received.note_model(name)
        created_models(received.state).delete(name, received.owner)
    return Response(status_code=200)


@get(router, _BLOB, None, dialect=OLLAMA)
async def has_blob(request: Request) -> Response:
    """Respond with 200 if the server has a file with this digest, otherwise with 404."""
    digest = request.path_params["digest"]
    if not created_models(get_state(request)).directory.has_blob(checked_digest(digest)):
        msg = f"no file has the digest {digest}: send it with POST"
        raise NotFound(msg)
    return Response(status_code=200)


@router.post(
    _BLOB,
    status_code=201,
    openapi_extra={
        "requestBody": _UPLOAD,
        **response_types(None, OllamaError, also=[408, 413, 415], status=201),
        **parameters(_BLOB),
    },
)
async def send_blob(request: Request) -> Response:
    """Store a file of a model if its SHA-256 is the digest in the path."""
    created = created_models(get_state(request))
    wanted = checked_digest(request.path_params["digest"])
    owner = request.scope[OWNER]
    with created.directory.receiving(owner) as (part, room):
        got = await _receive(request, part, room)
        if got != wanted:
            msg = f"digest is sha256:{wanted}, but the body has sha256:{got}: send the file again"
            raise InvalidRequest(msg, param="digest")
        created.directory.keep_blob(part, wanted, owner, room)
    return Response(status_code=201)


async def _receive(request: Request, part: Path, room: Room) -> str:
    """Write the body to `part` as it arrives, and return its SHA-256 in hexadecimal.

    room: reserves the bytes before they are written.

    Raises:
      PayloadTooLarge: the files on the server would exceed --models-bytes.
      RequestTimeout: the client paused too long.
      ClientGone: the client closed the connection.
      DiskError: the file cannot be written.
    """
    left, wait_s = room.left, get_state(request).limits.body_timeout_s
    found = hashlib.sha256()
    too_large = (
        f"The file is larger than {left} bytes, the room that was left: delete models, or start "
        "the server with a larger --models-bytes"
    )
    with writing("--models-dir"), os.fdopen(open_new(part), "wb") as out:

        def write(data: bytes) -> None:
            if not room.grow_to(room.bytes + len(data)):
                raise PayloadTooLarge(too_large)
            found.update(data)
            out.write(data)

        await receive_body(
            request,
            write,
            most=left,
            wait_s=wait_s,
            paused=f"The client sent nothing for {wait_s:g} s: send the file again",
            too_large=too_large,
        )
        out.flush()
        await asyncio.to_thread(os.fsync, out.fileno())
    return found.hexdigest()
