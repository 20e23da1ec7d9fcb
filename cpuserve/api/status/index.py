"""GET and HEAD /: the chat page for browsers, otherwise a description of the server."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response

from cpuserve.api.errors.unknown_route import BASE
from cpuserve.api.request.state import get_state
from cpuserve.api.response.openapi import response_types
from cpuserve.api.webui.router import page_for
from cpuserve.version import version

router = APIRouter()
# Ollama clients detect a running server by this body.
_RUNS = b"Ollama is running"
# Requests that accept one of these types explicitly get the description instead of _RUNS.
_DESCRIBED = ("text/html", "application/json")


class Welcome(msgspec.Struct):
    """The body of GET / for API clients."""

    server: str
    version: str
    message: str
    models: list[str]
    routes: list[str]


_DOCUMENTED = response_types(Welcome)
_DOCUMENTED["responses"]["200"]["content"]["text/plain"] = {"schema": {"type": "string"}}


@router.get("/", openapi_extra=_DOCUMENTED)
async def welcome(request: Request) -> Response:
    """Describe this server and list its routes; Ollama clients get "Ollama is running".

    A request that accepts JSON explicitly gets the description. A request that accepts HTML gets
    the chat page, or the description if the chat page is disabled. All others get the Ollama text.
    """
    page = page_for(request)
    if page is not None:
        return page
    accepted = request.headers.get("accept", "").lower()
    if not any(kind in accepted for kind in _DESCRIBED):
        return Response(_RUNS, media_type="text/plain", headers={"vary": "accept"})
    names = get_state(request).models.names
    message = (
        f"This is cpuserve, an inference server with OpenAI's API. The base URL for clients is the "
        f"address of this page followed by {BASE}."
    )
    welcome = Welcome("cpuserve", version(), message, list(names), request.app.state.paths)
    body = msgspec.json.encode(welcome)
    return Response(body, media_type="application/json", headers={"vary": "accept"})
