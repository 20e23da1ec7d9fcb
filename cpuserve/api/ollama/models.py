"""The routes about models: tags, ps, show, version, copy, delete, and blobs of their files."""

from __future__ import annotations

import hashlib
import math
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter, Request, Response

from cpuserve.api.errors.http_errors import PayloadTooLarge
from cpuserve.api.ollama.created.directory import open_new
from cpuserve.api.ollama.created.manifest import Manifest, checked_digest, checked_name
from cpuserve.api.ollama.created.modelfile import write_modelfile
from cpuserve.api.ollama.created.store import created_models
from cpuserve.api.ollama.errors import OLLAMA, OllamaError
from cpuserve.api.ollama.parameters import parameter_lines
from cpuserve.api.request.context import BodyForm, RequestContext, read_call
from cpuserve.api.request.file_body import receive_body
from cpuserve.api.request.headers import CALLER
from cpuserve.api.request.state import get_state
from cpuserve.api.response.listed import described, listed, timestamp
from cpuserve.api.response.openapi import json_body, parameters, response_types
from cpuserve.api.response.writer import json_response
from cpuserve.api.route import get, post
from cpuserve.api.stored.disk import writing
from cpuserve.base.errors import InvalidRequest, ModelError, NotFound
from cpuserve.base.fault_points import fault
from cpuserve.base.log import get_logger
from cpuserve.base.version import version
from cpuserve.loader.source_files import FileFacts, file_facts
from cpuserve.sampling.fields import names_in
from cpuserve.serving.threads import run_waiting

if TYPE_CHECKING:
    from cpuserve.api.ollama.created.directory import Room
    from cpuserve.serving.models.context import ModelContext

router = APIRouter()
log = get_logger("serve")
# Clients parse the version of Ollama and require a minimum (VS Code: 0.6.4).
# Version 0.12.11 added `logprobs`, the newest Ollama feature that this server supports.
_OLLAMA = "0.12.11"
_NEVER = "2200-01-01T00:00:00Z"  # The Ollama client shows this time as "Forever"


class OllamaShow(msgspec.Struct):
    """The body of POST /api/show. Older clients send `name`; verbose: include lists and tensors."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


class OllamaModels(msgspec.Struct):
    """The body of GET /api/tags and /api/ps."""

    models: list[dict[str, Any]]


class OllamaVersion(msgspec.Struct):
    """The response to GET /api/version."""

    version: str
    cpuserve: str


class OllamaModel(msgspec.Struct):
    """The response of POST /api/show: the model's capabilities, files and context length.

    tensors: the name, type and shape of each tensor, if the request has `verbose`.
    """

    modified_at: str
    modelfile: str
    parameters: str
    template: str
    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[str]
    system: str | msgspec.UnsetType = msgspec.UNSET
    license: str | msgspec.UnsetType = msgspec.UNSET
    messages: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET
    tensors: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET


@get(router, "/api/tags", OllamaModels, dialect=OLLAMA)
async def tags(request: Request) -> Response:
    """List all served models, whether loaded or not."""
    models = get_state(request).models
    return json_response(OllamaModels([listed(models, name) for name in models.names]))


@get(router, "/api/ps", OllamaModels, dialect=OLLAMA)
async def loaded(request: Request) -> Response:
    """List the models that are loaded now, without changing how long they stay loaded."""
    models = get_state(request).models
    found = [
        {
            **listed(models, name),
            "expires_at": _expiry(models.expires_s(name)),
            "size_vram": 0,
            "context_length": context.max_model_len,
        }
        for name in models.names
        if models.is_loaded(name) and (context := models.peek(name)) is not None
    ]
    return json_response(OllamaModels(found))


def _expiry(seconds: float) -> str:
    """Return the time at which a model is unloaded, `seconds` from now, as a text."""
    return _NEVER if seconds == math.inf else timestamp(time.time() + seconds)


@post(
    router,
    "/api/show",
    schema=OllamaShow,
    response=OllamaModel,
    dialect=OLLAMA,
    id_prefix="ollama-",
)
async def show(request: RequestContext, body: OllamaShow) -> Response:
    """Describe a model and its capabilities, after loading it if necessary."""
    model = body.model or body.name
    if not model:
        msg = "model is missing"
        raise InvalidRequest(msg, param="model")
    await request.choose(model)
    context, name, verbose = request.context, request.served.name, bool(body.verbose)
    able, created = context.abilities, request.state.created
    made = Manifest(name=name) if created is None else created.find(name) or Manifest(name=name)
    parent = made.parent or request.models.parent(name) or ""
    facts = await _facts(context, whole=verbose)
    shown = OllamaModel(
        timestamp(context.started),
        "",
        _parameters(context),
        _template(context, calls_tools="tools" in able),
        described(context.details, parent),
        {**facts.metadata, **_info(context, name)},
        able,
        made.system or msgspec.UNSET,
        "\n".join(made.license) or msgspec.UNSET,
        made.messages or msgspec.UNSET,
        [asdict(tensor) for tensor in facts.tensors] if verbose else msgspec.UNSET,
    )
    shown.modelfile = write_modelfile(
        parent or name,
        system=made.system,
        template=shown.template,
        parameters=shown.parameters,
        messages=made.messages,
        licenses=made.license,
    )
    return json_response(shown)


async def _facts(context: ModelContext, *, whole: bool) -> FileFacts:
    """Return the metadata in the model's files; empty if they can no longer be read."""
    if not context.details.path:
        return FileFacts({}, [])
    try:
        return await run_waiting(lambda: file_facts(Path(context.details.path), whole=whole))
    except (OSError, ModelError) as error:
        log.warning("/api/show: %s", error)
        return FileFacts({}, [])


def _parameters(context: ModelContext) -> str:
    """Return the request defaults as Modelfile lines; Continue reads num_ctx in these lines."""
    names = names_in("ollama")
    values = {"num_ctx": context.max_model_len, **context.default_sampling}
    return parameter_lines({names.get(name, name): value for name, value in values.items()})


def _info(context: ModelContext, name: str) -> dict[str, Any]:
    """Return the object `model_info`; context_length is the longest sequence of a request."""
    details = context.details
    family = details.family or "model"
    counts = {
        "general.parameter_count": details.parameters,
        f"{family}.embedding_length": details.width,
        f"{family}.block_count": details.layers,
    }
    return {
        "general.architecture": family,
        "general.basename": name,
        f"{family}.context_length": context.max_model_len,
        **{key: count for key, count in counts.items() if count},
    }


def _template(context: ModelContext, *, calls_tools: bool) -> str:
    """Return the chat template; "" if it mentions tools but the server cannot parse its calls.

    Clients look for the word "tools" in the template to find out whether they may send tools.
    """
    found = context.get_chat_template()
    source = (found.tool_source if calls_tools else found.source) or ""
    return source if calls_tools or "tools" not in source.lower() else ""


@get(router, "/api/version", OllamaVersion, dialect=OLLAMA)
async def show_version() -> Response:
    """Return the version of the Ollama API that this server supports, and its own version."""
    return json_response(OllamaVersion(_OLLAMA, version()))


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
    owner = request.scope[CALLER].owner
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
            fault("content.write")
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
        fault("content.sync")
        await run_waiting(lambda: os.fsync(out.fileno()))
    return found.hexdigest()
