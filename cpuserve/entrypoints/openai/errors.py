"""Errors on the wire: OpenAI's shape {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from cpuserve.errors import DeadlineExceeded, NotFound, RequestError, TooManyRequests

if TYPE_CHECKING:
    from fastapi import FastAPI, Request
    from starlette.types import Receive, Scope, Send

log = logging.getLogger(__name__)

# What a client must not learn from an internal failure: addresses and places in our files.
_INTERNAL = re.compile(r"\b0x[0-9a-fA-F]+|(?<![\w.])/(?:[\w.+-]+/)+[\w.+-]*")
_MAX_MESSAGE_CHARS = 2000


class Unauthorized(RequestError):
    """The API key is missing or wrong (401)."""

    status = 401
    kind = "AuthenticationError"


class MethodNotAllowed(RequestError):
    """The route exists, the method does not (405)."""

    status = 405
    kind = "MethodNotAllowedError"


class RequestTimeout(RequestError):
    """The client did not send its body in time (408); the connection is closed."""

    status = 408
    kind = "RequestTimeoutError"


class PayloadTooLarge(RequestError):
    """The body is over the cap (413); the connection is closed."""

    status = 413
    kind = "PayloadTooLargeError"


class UnsupportedMediaType(RequestError):
    """The body is not declared as JSON (415)."""

    status = 415
    kind = "UnsupportedMediaTypeError"


class HeadersTooLarge(RequestError):
    """Too many or too long header fields (431); the connection is closed."""

    status = 431
    kind = "RequestHeaderFieldsTooLargeError"


class ServiceUnavailable(RequestError):
    """The model is loading, the engine is dead or the server is stopping (503)."""

    status = 503
    kind = "ServiceUnavailableError"


class ErrorInfo(msgspec.Struct):
    """What went wrong; `code` is the HTTP status."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(msgspec.Struct):
    """The body of every answer that is not 2xx."""

    error: ErrorInfo


# How long a refused client may go on sending before the connection is cut.
LINGER_S = 2.0
_CLOSING = frozenset({408, 413, 431})


def public_message(error: BaseException) -> str:
    """The text a client may read: a RequestError's own below 500, else without internals."""
    if not isinstance(error, RequestError):
        return "Internal server error. The server's log has the details."
    text = error.message
    if error.status >= 500:
        text = _INTERNAL.sub("...", text)
    return text[:_MAX_MESSAGE_CHARS]


def error_json(error: BaseException) -> bytes:
    """`error` as the JSON of an ErrorBody."""
    status = error.status if isinstance(error, RequestError) else 500
    kind = error.kind if isinstance(error, RequestError) else "InternalServerError"
    param = error.param if isinstance(error, RequestError) else None
    # A message may quote the request; a lone surrogate in it must not fail the answer.
    message = public_message(error).encode("utf-8", "replace").decode()
    return msgspec.json.encode(ErrorBody(ErrorInfo(message, kind, param, status)))


def error_response(error: BaseException, headers: dict[str, str] | None = None) -> Response:
    """`error` as an HTTP response with its status; unknown exceptions are 500."""
    status = error.status if isinstance(error, RequestError) else 500
    all_headers = dict(headers or {})
    if isinstance(error, TooManyRequests):
        all_headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, DeadlineExceeded):
        # Clients repeat a 504 by themselves, which would take as long again for the same end.
        all_headers["x-should-retry"] = "false"
    if isinstance(error, Unauthorized):
        all_headers["www-authenticate"] = "Bearer"
    if status in _CLOSING:
        all_headers["connection"] = "close"
    return Response(error_json(error), status, all_headers, "application/json")


class _Lingering(Response):
    """A response to a request whose body is still coming.

    A connection closed with unread data is reset, and the client would lose the answer: what comes
    is read and dropped, for a while, before the response ends.
    """

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        """Answer, then drop the rest of the body."""
        head = {"type": "http.response.start", "status": self.status_code}
        await send({**head, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(_drop_body(receive), LINGER_S)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _drop_body(receive: Receive) -> None:
    while (await receive()).get("more_body", False):
        pass


async def _on_request_error(_: Request, error: Exception) -> Response:
    response = error_response(error)
    if isinstance(error, PayloadTooLarge):
        return _Lingering(response.body, response.status_code, dict(response.headers))
    return response


async def _on_http_exception(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    shown: RequestError
    if error.status_code == 404:
        shown = NotFound(f"Unknown route: {request.method} {request.url.path}")
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        shown = MethodNotAllowed(
            f"{request.method} is not allowed on {request.url.path}: use {allowed}"
        )
    else:
        shown = RequestError(str(error.detail))
        shown.status = error.status_code
    return error_response(shown, dict(error.headers or {}))


def install_error_handlers(app: FastAPI) -> None:
    """Answer RequestErrors, unknown routes and unknown methods in OpenAI's shape."""
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
