"""Convert errors to HTTP responses in the error format of the dialect of the path."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from fastapi.responses import Response
from starlette.exceptions import HTTPException

from cpuserve.api.errors.dialect import OPENAI, Dialect
from cpuserve.api.errors.record import note_failure
from cpuserve.api.errors.unknown_route import (
    allowed_methods,
    missing_method,
    unknown_route,
)
from cpuserve.base.errors import (
    DeadlineExceeded,
    NotFound,
    RequestError,
    ServiceUnavailable,
    TooManyRequests,
    status_of,
)

if TYPE_CHECKING:
    from fastapi import FastAPI, Request
    from starlette.types import Receive, Scope

log = logging.getLogger(__name__)


class Unauthorized(RequestError, status=401):
    """The API key is missing or wrong (401)."""


class Forbidden(RequestError, status=403):
    """The Host header has a name that this server does not accept, or a key another owner (403)."""


class MethodNotAllowed(RequestError, status=405):
    """The path exists, but not with this HTTP method (405)."""


class RequestTimeout(RequestError, status=408):
    """The client did not send its body in time (408); the connection is closed."""


class PayloadTooLarge(RequestError, status=413):
    """The body exceeds the size limit (413); the connection is closed."""


class UnsupportedMediaType(RequestError, status=415):
    """The body is not declared as JSON (415)."""


class HeadersTooLarge(RequestError, status=431):
    """The request has too many or too long header fields (431); the connection is closed."""


class ServerBusy(ServiceUnavailable):
    """The server has no capacity for this request now, but will soon (503 with Retry-After)."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


# For each RequestError.role (a field of GenerateCall), the field of the dialect with this value;
# RequestError.use_words puts this field into the error.
Words = Mapping[str, str]

# The keys in ASGI scopes for the Dialect, the id and the Words of a request.
DIALECT = "cpuserve.dialect"
REQUEST_ID = "cpuserve.request_id"
WORDS = "cpuserve.words"

# How many seconds a rejected client may continue to send before the connection is closed.
LINGER_S = 2.0
# How many bytes it may send in this time.
LINGER_BYTES = 1 << 28
_CLOSING = frozenset({408, 413, 431})


def settle_failure(error: BaseException, scope: Scope) -> None:
    """Put the request field of the dialect into an error, and store the error for the log.

    An exception that becomes status 500 is logged immediately,
    with the request id that the client gets.
    """
    if isinstance(error, RequestError) and WORDS in scope:
        error.use_words(scope[WORDS])
    note_failure(error, scope)
    where = scope.get(REQUEST_ID), scope.get("method"), scope.get("path")
    if not isinstance(error, RequestError):
        log.error("request %s failed: %s %r", *where, exc_info=error)
    elif error.status == 500:
        log.error("request %s failed: %s %r: %s", *where, error.message)


def error_response(
    error: BaseException, headers: dict[str, str] | None = None, scope: Scope | None = None
) -> Response:
    """Return `error` as an HTTP response with its status; 500 for unknown exceptions.

    scope: the ASGI scope of the request; its dialect determines the format.
    """
    status = status_of(error)
    all_headers = dict(headers or {})
    if isinstance(error, TooManyRequests | ServiceUnavailable):
        all_headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
        if error.retry_after_s < 1:  # OpenAI clients also read this header
            all_headers["retry-after-ms"] = str(math.ceil(1000 * error.retry_after_s))
    if isinstance(error, DeadlineExceeded):
        # OpenAI clients would retry a 504, which would take as long again and fail in the same way.
        all_headers["x-should-retry"] = "false"
    if isinstance(error, Unauthorized):
        all_headers["www-authenticate"] = "Bearer"
    if status in _CLOSING:
        all_headers["connection"] = "close"
    known = scope or {}
    note_failure(error, known)
    dialect: Dialect = known.get(DIALECT, OPENAI)
    body = dialect.error(error, known.get(REQUEST_ID, ""))
    return Response(body, dialect.status(error), all_headers, "application/json")


async def drop_body(receive: Receive) -> None:
    """Read the rest of a body, for up to LINGER_S seconds and LINGER_BYTES."""
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(_read_and_drop(receive), LINGER_S)


async def _read_and_drop(receive: Receive) -> None:
    dropped = 0
    while dropped <= LINGER_BYTES:
        message = await receive()
        dropped += len(message.get("body", b""))
        if not message.get("more_body", False):
            return


async def _on_request_error(request: Request, error: Exception) -> Response:
    settle_failure(error, request.scope)
    if isinstance(error, PayloadTooLarge | ServerBusy):
        return error_response(error, {"connection": "close"}, request.scope)
    return error_response(error, None, request.scope)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    shown: RequestError
    if error.status_code == 404:
        shown = _unknown_route(request)
    elif error.status_code == 405:
        # Starlette lists only the methods of one route, but a path may have a route per method.
        allowed = ", ".join(allowed_methods(request.url.path, request.app.state.routes))
        error.headers = {**(error.headers or {}), "Allow": allowed}
        shown = MethodNotAllowed(missing_method(request.method, request.url.path, allowed))
    else:
        shown = RequestError(str(error.detail))
        shown.status = error.status_code
    return error_response(shown, dict(error.headers or {}), request.scope)


def _unknown_route(request: Request) -> NotFound:
    told = unknown_route(request.method, request.url.path, request.app.state.paths)
    return NotFound(told, code="unknown_url")


def install_error_handlers(app: FastAPI) -> None:
    """Make the app respond to RequestErrors and unknown routes or methods with error_response."""
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
