"""POST /api/pull: download a Hugging Face model or a built-in model, and serve it."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter, Response

from cpuserve.api.ollama.created.manifest import Manifest, checked_name
from cpuserve.api.ollama.created.store import CreatedModels, created_models
from cpuserve.api.ollama.errors import OLLAMA
from cpuserve.api.ollama.progress import DONE, OllamaProgress, Steps, progress_response
from cpuserve.api.request.context import RequestContext
from cpuserve.api.response.listed import digest_of
from cpuserve.api.response.openapi import LINES
from cpuserve.api.route import post
from cpuserve.api.stored.disk import disk_error
from cpuserve.base.errors import ModelError, NotFound, RequestError
from cpuserve.base.log import get_logger
from cpuserve.config.values import format_bytes
from cpuserve.serving.calls.call import unsupported
from cpuserve.serving.models.preparation import in_background

if TYPE_CHECKING:
    from pathlib import Path

    from cpuserve.api.ollama.created.directory import Room

log = get_logger("serve")
router = APIRouter()
_PULLING = OllamaProgress("pulling manifest")
# Libraries report each downloaded block; lines are sent at most once in this many seconds.
_BETWEEN_S = 0.1


class OllamaPull(msgspec.Struct, kw_only=True):
    """The body of POST /api/pull and /api/push. Older clients send `name` for `model`."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None
    insecure: bool | None = None
    username: str | None = None
    password: str | None = None


@post(
    router,
    "/api/pull",
    schema=OllamaPull,
    response=OllamaProgress,
    dialect=OLLAMA,
    id_prefix="ollama-",
    stream=LINES,
    pages=False,
)
async def pull(request: RequestContext, body: OllamaPull) -> Response:
    """Download a model and serve it under its name; a served model is not downloaded again."""
    name = checked_name(body.model or body.name)
    request.note_model(name)
    if body.insecure:
        msg = "insecure is not supported, because downloads use HTTPS: omit it"
        raise unsupported(msg, "insecure")
    stream = body.stream is not False
    if name in request.models.names:
        return progress_response(request, _there(), stream=stream)
    created = created_models(request.state)
    created.check_name(name, request.owner)
    steps = _pull(created, name, request.owner)
    return progress_response(request, steps, stream=stream)


@post(
    router,
    "/api/push",
    schema=OllamaPull,
    response=OllamaProgress,
    dialect=OLLAMA,
    id_prefix="ollama-",
    stream=LINES,
    pages=False,
)
async def push(_request: RequestContext, _body: OllamaPull) -> Response:
    """Refuse to upload a model, because this server knows no registry to send it to."""
    msg = "push is not supported, because this server has no registry: copy the files of the model"
    raise unsupported(msg, "model")


async def _there() -> Steps:
    yield _PULLING
    yield DONE


async def _pull(created: CreatedModels, name: str, owner: str) -> Steps:
    made = Manifest(name=name, owner=owner, model=name, parent=name, created=int(time.time()))
    async with aclosing(create_downloaded(created, made)) as steps:
        async for step in steps:
            yield step
    log.info("model %s was pulled, as a client asked", name)
    yield DONE


async def create_downloaded(created: CreatedModels, made: Manifest) -> Steps:
    """Download the model `made.model`, yield the progress, and create the model `made`.

    Its place and its bytes are reserved from the start. For further errors,
    see `_download` and `CreatedModels.create`.
    """
    directory = created.directory
    with directory.creating(made):
        async with created.pulling.slot(made.owner):
            with directory.reserving(made.owner) as room:
                async with aclosing(_download(made.model, room)) as steps:
                    async for step in steps:
                        yield step
                made.size = room.bytes
                yield OllamaProgress("writing manifest")
                await created.create(made)


async def _download(name: str, room: Room) -> Steps:
    """Download a model of the Hugging Face hub or a built-in model, and yield the progress.

    The first progress is yielded after the model has been found.

    room: reserves the bytes as soon as their number is known.

    Raises:
      NotFound: the model does not exist, cannot be downloaded, or is too large.
      DiskError: the disk of the cache is full or read-only.
    """
    loop, reports = asyncio.get_running_loop(), asyncio.Queue[OllamaProgress | None]()
    stop, digest = threading.Event(), digest_of(name)
    told = 0.0

    def report(_what: str, done: int, total: int) -> None:
        nonlocal told
        if stop.is_set():
            msg = "the client has left"
            raise ModelError(msg)
        _reserve(room, max(done, total))
        now = time.monotonic()
        if now - told >= _BETWEEN_S or done == total:
            told = now
            step = OllamaProgress(f"pulling {name}", digest, total, done)
            loop.call_soon_threadsafe(reports.put_nowait, step)

    def fetch() -> Path:
        from cpuserve.loader.hub import resolve_model

        return resolve_model(name, progress=report, local=False)

    fetching = asyncio.wrap_future(in_background(fetch))

    def on_end(done: asyncio.Future[Path]) -> None:
        if not done.cancelled():
            done.exception()  # mark the error as seen; it is raised below if the client is there
        reports.put_nowait(None)

    fetching.add_done_callback(on_end)
    try:
        first = True
        while (step := await reports.get()) is not None:
            if first:
                yield _PULLING
            first = False
            yield step
        try:
            await fetching
        except ModelError as error:
            raise _refused(name, error) from None
        if first:
            yield _PULLING
    finally:
        stop.set()
        try:  # the thread writes until its next report, so the room and the turn stay taken
            if not fetching.done():
                await asyncio.wait((fetching,))
        finally:
            fetching.cancel()


def _refused(name: str, error: ModelError) -> RequestError:
    """Return the error of a request for a model that cannot be downloaded."""
    if (full := disk_error(error, "the cache of models")) is not None:
        return full
    return NotFound(f"model {name!r} cannot be pulled: {error}", code="model_not_found")


def _reserve(room: Room, num_bytes: int) -> None:
    """Reserve `num_bytes` in all for a download; ModelError if there is no room for them."""
    if not room.grow_to(num_bytes):
        left = room.left + room.bytes
        msg = (
            f"it has {format_bytes(num_bytes)}, and {format_bytes(left)} are left: delete models, "
            "or start the server with a larger --models-bytes"
        )
        raise ModelError(msg)
