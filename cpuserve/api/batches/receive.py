"""Store an upload as a file of its caller, in the API of any vendor."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.responses import FileResponse

from cpuserve.api.batches.facts import UNKNOWN_TYPE, check_content
from cpuserve.api.batches.start import batches_of
from cpuserve.api.batches.upload import Uploaded, read_upload
from cpuserve.api.request.headers import CALLER
from cpuserve.api.request.state import get_state
from cpuserve.base.errors import InvalidRequest

if TYPE_CHECKING:
    from fastapi import Request, Response

    from cpuserve.api.batches.directory import StoredFile, UploadFacts


def find_file(request: Request) -> StoredFile:
    """Return the file with the id in the path of a request; NotFound if its caller has none."""
    directory = batches_of(get_state(request)).directory
    return directory.find(request.scope[CALLER].owner, request.path_params["file_id"])


async def receive_file(request: Request, facts_of: Callable[[Uploaded], UploadFacts]) -> StoredFile:
    """Store the file of an upload, and return its description.

    facts_of: returns the facts of an upload, or raises InvalidRequest.

    Raises:
      RequestError: the upload is refused, or cannot be stored (see read_upload).
    """
    state, caller = get_state(request), request.scope[CALLER].owner
    directory = batches_of(state).directory
    file_id = directory.begin(caller)
    try:
        sent = await read_upload(request, directory, file_id, state.limits.body_timeout_s)
        facts = facts_of(sent)
        check_content(facts.purpose, sent.undecodable)
        await directory.add(caller, file_id, facts)
        return directory.find(caller, file_id)
    except BaseException:
        directory.remove(file_id)
        raise


def remove_file(request: Request) -> str:
    """Delete the file with the id in the path of a request, and return this id.

    Raises:
      InvalidRequest: a batch that has not ended reads it.
      DiskError: the directory cannot be written.
    """
    batches, file_id = batches_of(get_state(request)), find_file(request).file.id
    if batches.uses(file_id):
        msg = f"File {file_id!r} is the input of a batch that has not ended: cancel the batch"
        raise InvalidRequest(msg, param="file_id")
    batches.directory.remove(file_id)
    return file_id


def content_of(request: Request) -> Response:
    """Return the content of the file with the id in the path of a request."""
    stored = find_file(request)
    path = batches_of(get_state(request)).directory.path_of(stored.file.id)
    return FileResponse(path, media_type=UNKNOWN_TYPE)
