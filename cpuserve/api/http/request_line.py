"""Middleware that normalizes unusual HTTP requests, and rejects an ambiguous body length."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpuserve.api.errors.http_errors import error_response
from cpuserve.errors import InvalidRequest

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


class RequestLine:
    """Normalizes requests for the middleware and routes after this one.

    HEAD gets the response of GET without the body. A request for a full URL, which clients
    of a proxy send, becomes a request for its path, and its host replaces the Host header
    (RFC 9112, 3.2.2). A request with both Content-Length and Transfer-Encoding is rejected
    and its connection is closed, because a proxy may have read it as two requests (RFC 9112, 6.1).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app with a normalized request, or reject an ambiguous body length."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        names = {name for name, _ in scope["headers"]}
        if {b"content-length", b"transfer-encoding"} <= names:
            msg = "The request has both Content-Length and Transfer-Encoding: send one of them"
            error = InvalidRequest(msg, code="invalid_http")
            await error_response(error, {"connection": "close"}, scope)(scope, receive, send)
            return
        _use_path_only(scope)
        if scope["method"] == "HEAD":
            # Change only a copy of the scope: the HTTP server must see HEAD and send no body.
            await self._app({**scope, "method": "GET"}, receive, _without_body(send))
        else:
            await self._app(scope, receive, send)


def _use_path_only(scope: Scope) -> None:
    """Change a request for http://host/path to a request for /path with the Host header `host`."""
    scheme, found, rest = scope["path"].partition("://")
    if not found or scheme.lower() not in ("http", "https"):
        return
    authority, slash, path = rest.partition("/")
    scope["path"] = slash + path or "/"
    scope["raw_path"] = scope["path"].encode()
    others = [(name, value) for name, value in scope["headers"] if name != b"host"]
    scope["headers"] = [(b"host", authority.encode("latin-1", "replace")), *others]


def _without_body(send: Send) -> Send:
    async def send_head(message: Message) -> None:
        if message["type"] == "http.response.body":
            message = {**message, "body": b""}
        await send(message)

    return send_head
