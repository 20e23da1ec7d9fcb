"""The chat page: HTML at / for browsers, and its other files below /webui."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from cpuserve.api.webui.page import asks_for_page, page_files
from cpuserve.base.errors import NotFound

if TYPE_CHECKING:
    from cpuserve.api.webui.page import PageFile

router = APIRouter()


@router.get("/webui/{name}", include_in_schema=False)
@router.get("/webui/{digest}/{name}", include_in_schema=False)
async def file_of_page(request: Request) -> Response:
    """Return a file of the chat page."""
    file = page_files().get(request.url.path)
    if file is None:
        msg = f"The chat page has no file {request.url.path[:200]!r}: reload the page"
        raise NotFound(msg)
    return _response(request, file)


def page_for(request: Request) -> Response | None:
    """Return the chat page for a browser's request to /; None if disabled or not requested."""
    if not request.app.state.webui or not asks_for_page(request.scope):
        return None
    return _response(request, page_files()["/"])


def _response(request: Request, file: PageFile) -> Response:
    body, headers = file.sent(request.headers.get("accept-encoding", ""))
    tags = request.headers.get("if-none-match", "").split(",")
    # A proxy that changes the compression marks the tag as weak.
    known = {tag.strip().removeprefix("W/") for tag in tags}
    if headers["etag"] in known:
        return Response(status_code=304, headers=dict(headers))
    return Response(body, headers=dict(headers))
